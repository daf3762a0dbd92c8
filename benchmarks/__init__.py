"""Benchmarks: ratios against named peers, measured in one run. Not part of the tests; nothing here asserts a time."""
