"""Noise of single steps."""
