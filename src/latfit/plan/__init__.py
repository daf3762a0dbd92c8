"""Decisions from fits: which batches meet an SLA, and from which batch the GPU pays."""
