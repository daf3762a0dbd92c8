"""Residuals: what they hold that noise would not, and the warnings that follow."""
