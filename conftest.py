"""The plugin comes from its entry point; registering it here as well would load it twice."""
