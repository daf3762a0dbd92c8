"""Batches to a model of a Triton server, by gRPC or HTTP."""
