"""The pictures of the README and the docs, each made by what it shows."""
