"""Minimising what a fit minimises: starts, descent, and where a descent needs help."""
