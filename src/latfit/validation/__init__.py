"""A measured serving run against its simulation."""
