"""Root mean square layer normalisation of Llama's kind (Zhang and Sennrich 2019)."""

from . import layers

__all__ = ["layers"]
