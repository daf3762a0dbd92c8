"""A plan as tables and figures."""
