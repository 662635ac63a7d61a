"""What is exact without counting: what was active, and what was learnt. Pure."""
