"""Latency models as pure formulas: T(B, S), its gradient, its parameters, its inverse; and the record of a fit."""
