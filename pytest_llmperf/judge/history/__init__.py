"""Since when a case takes what it takes: change points over runs."""
