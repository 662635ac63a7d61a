"""What an inspected step tells of whether a training learns."""
