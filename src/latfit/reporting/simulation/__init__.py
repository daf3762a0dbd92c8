"""Simulations as tables, figures and a page."""
