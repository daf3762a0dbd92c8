"""Fitting: from a clean trace to a `FitResult`."""

from latfit.fit.front import fit_trace
from latfit.fit.problem import FitOptions

__all__ = ["FitOptions", "fit_trace"]
