"""Tuning: the best configuration of a space on the hardware at hand: searched, compared in turns, shown to be sound."""
