"""A fit as tables, figures and a page."""
