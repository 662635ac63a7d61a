"""The largest micro-batch of a spec: searched for, and held against its baseline."""
