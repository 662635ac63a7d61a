"""Cases that are judged, and recorded, by what fake tensors tell of their steps: nothing is launched."""
