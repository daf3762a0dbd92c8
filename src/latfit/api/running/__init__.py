"""Verbs on a machine or an engine that runs: recorded, examined, watched."""
