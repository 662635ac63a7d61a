"""What measured figures mean: causes, cost, scaling, ladders. Pure."""
