"""Models worth trying on many systems of one source: those that won a tenth of the probed systems."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from latfit.model import CORRECTION, FitResult

WON_SHARE = 0.1
ALWAYS = ("constant", "linear")


@dataclass(frozen=True)
class Shortlist:
    """Models to try (and CORRECTION), and the largest held-out error in percent of the systems that chose them."""

    models: tuple[str, ...]
    error_pct: float

    def holds(self, found: FitResult) -> bool:
        error = found.cross_validation.mape_pct
        return error is not None and error <= self.error_pct


def shortlist_of(probed: Sequence[FitResult]) -> Shortlist | None:
    """Return the models that won often enough; None where no probed system compared models."""
    compared = [found for found in probed if found.cross_validation.selection and found.cross_validation.mape_pct]
    won = Counter(found.model for found in compared)
    won[CORRECTION] = sum(found.correction is not None for found in compared)
    chosen = [name for name, times in won.items() if times and times >= WON_SHARE * len(compared)]
    errors = [found.cross_validation.mape_pct or 0.0 for found in compared]
    return Shortlist(tuple(dict.fromkeys([*ALWAYS, *chosen])), max(errors)) if errors else None
