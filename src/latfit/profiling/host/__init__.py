"""The machine that measures."""
