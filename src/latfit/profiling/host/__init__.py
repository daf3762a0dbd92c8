"""The machine that measures: its CPU, what ran on it, its clocks."""
