"""Batching policies on one or two paths."""
