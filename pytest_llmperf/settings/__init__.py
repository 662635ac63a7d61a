"""What a training is made of: its settings, models, texts, and the spaces that a search goes through."""
