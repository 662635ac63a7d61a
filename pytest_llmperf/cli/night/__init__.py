"""A night: its cluster file, its jobs, the file that all nights are noted in, and its results as one."""
