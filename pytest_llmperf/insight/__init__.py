"""What figures mean: utilisation of the chip, memory, cost, gains, scaling and who holds the others up. Pure."""
