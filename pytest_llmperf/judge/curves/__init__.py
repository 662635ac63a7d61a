"""What trainings on a text lose, step by step, beside the same seeds before. Pure, but for ``curve_store``."""
