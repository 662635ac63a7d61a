"""What was measured and concluded, as data that is written to files and read again; nothing here judges."""
