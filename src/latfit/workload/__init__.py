"""Loads: requests as columns, arrival laws, lengths, recorded requests of other tools, random streams."""
