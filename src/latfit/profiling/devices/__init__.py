"""Devices that execute a step."""
