"""What figures mean: utilisation of the chip. Pure."""
