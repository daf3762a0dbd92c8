"""How much wider an interval has to be for a step with more tokens than were measured.

A fit keeps how it did when only the steps of up to S_t tokens trained it and those above, up to the largest S_max,
were asked: nine of ten were off by less than a share e. Its terms are powers of S, so that an error of a power grows
with the logarithm of the distance. A step of S > S_max tokens therefore has its limits moved outwards by the factor

    (1 + e)^(ln(S/S_max) / ln(S_max/S_t)),

which is 1 + e where it lies as far outside as the farthest of the steps that were asked. Where a fit was never asked
so, it cannot tell.
"""

import math

import numpy as np

from latfit.model.result import FitResult
from latfit.stats import FloatArray

CANNOT_TELL = "No interval beyond the measured tokens: the data hold too few values of S to try an extrapolation."


def widening(fit: FitResult, S: FloatArray) -> FloatArray:
    """Factor (n,) >= 1 on both limits of steps of S tokens; NaN where the fit cannot tell."""
    known = np.ones(np.shape(S))
    if "S" not in fit.domain:
        return known
    measured = float(fit.domain["S"][1])
    beyond = np.asarray(S) > measured
    if not beyond.any():
        return known
    tried = fit.cross_validation.get("extrapolation_S", {})
    trained = float(tried.get("trained_up_to_S", math.nan))
    if not 0 < trained < measured:
        known[beyond] = np.nan
        return known
    distance = np.log(np.asarray(S)[beyond] / measured) / math.log(measured / trained)
    known[beyond] = (1 + float(tried["p90_ape_pct"]) / 100) ** distance
    return known
