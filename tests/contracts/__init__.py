"""Interfaces: what commands print with --json, files they write, help texts."""
