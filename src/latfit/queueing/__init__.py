"""Waiting times: closed forms, exact chains and proved bounds for the queues in front of inference steps."""
