"""The package against programs that share no code with it."""
