"""What a machine could do at best, compared with its fit.

A step on S tokens takes at least max(S flops_per_token / flops, step_bytes / bandwidth). A fit above that ceiling means
that a number is wrong; one far below it shows how much the software leaves.
"""

from dataclasses import asdict, dataclass, fields

import numpy as np

from latfit.errors import WrongUsage
from latfit.model import FitResult
from latfit.records import Record

PER_MS = 1e-3


@dataclass(frozen=True)
class Ceiling:
    """Peak of the machine in FLOP/s and bytes/s, FLOP of a token, and bytes that every step reads; None: unknown."""

    flops: float | None = None
    bandwidth: float | None = None
    flops_per_token: float | None = None
    step_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (np.isfinite(value) and value > 0):
                option = f"--{name.replace('_', '-')}"
                raise WrongUsage(f"{value:g} is not above zero", where=option, remedy="Give a number above zero.")

    @property
    def known(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def updated(self, newer: "Ceiling") -> "Ceiling":
        """Return these numbers, with the newer ones where there are any."""
        return Ceiling(**{f.name: getattr(newer, f.name) or getattr(self, f.name) for f in fields(self)})

    def tokens_per_ms(self) -> float | None:
        """Return the most tokens per ms that the arithmetic allows."""
        if self.flops is None or self.flops_per_token is None:
            return None
        return self.flops / self.flops_per_token * PER_MS

    def floor_ms(self) -> float | None:
        """Return the least ms of any step: its bytes must be read."""
        if self.bandwidth is None or self.step_bytes is None:
            return None
        return self.step_bytes / self.bandwidth / PER_MS


class CeilingShare(Record, frozen=True):
    """Fitted peak and fastest step in the measured range, and their shares of the machine's; None where unknown."""

    fitted_tokens_per_ms: float
    ceiling_tokens_per_ms: float | None
    peak_share: float | None
    fitted_fastest_ms: float
    floor_ms: float | None
    floor_share: float | None


def beside_the_fit(ceiling: Ceiling, fit: FitResult) -> CeilingShare:
    """Compare the fitted peak throughput and fastest step over the measured range with the ceiling."""
    (B_low, B_high), (S_low, S_high) = fit.domain["B"], fit.domain["S"]
    B = np.unique(np.round(np.geomspace(max(B_low, 1), B_high, 60)))
    S = np.unique(np.round(np.geomspace(max(S_low, 1), S_high, 120)))
    B, S = (axis.ravel() for axis in np.meshgrid(B, S))
    steps = B[S >= B], S[S >= B]
    if not len(steps[0]):
        steps = np.array([float(B_low)]), np.array([float(max(S_high, B_low))])
    times = fit.latency_ms(*steps)
    peak, fastest = float((steps[1] / times).max()), float(times.min())
    rate, floor = ceiling.tokens_per_ms(), ceiling.floor_ms()
    of_peak, of_floor = None if rate is None else peak / rate, None if floor is None else floor / fastest
    return CeilingShare(peak, rate, of_peak, fastest, floor, of_floor)
