"""Logs of vLLM, read by compiled code."""
