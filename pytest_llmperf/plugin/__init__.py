"""What pytest sees. This process never imports torch: training happens in the worker."""
