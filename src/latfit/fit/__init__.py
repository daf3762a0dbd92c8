"""Fitting: from a clean trace to a `FitResult`."""

from latfit.fit.doubts import DoubtOptions
from latfit.fit.front import fit_trace
from latfit.fit.problem import FitOptions

__all__ = ["DoubtOptions", "FitOptions", "fit_trace"]
