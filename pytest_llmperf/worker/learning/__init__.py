"""What one rank looks at in the step that comes after all others, to see that training learns."""
