"""Batching rules as pure decisions: what to do with a queue, never how it is done."""
