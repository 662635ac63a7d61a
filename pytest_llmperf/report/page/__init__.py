"""A run as one HTML page that needs nothing else: what it shows as data, and how that is drawn."""
