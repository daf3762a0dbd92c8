"""What a machine could do at best, beside what the fit says it does.

A step on S tokens that computes `flops_per_token` each and reads `step_bytes` (the weights, once a step) takes at least
max(S flops_per_token / flops, step_bytes / bandwidth). So no fit can honestly exceed flops / flops_per_token tokens a
second, and no small step be faster than step_bytes / bandwidth. A fit above its ceiling means that a number is wrong;
one far below it says how much the software leaves.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.model import FitResult
from latfit.records import Record

PER_MS = 1e-3


@dataclass(frozen=True)
class Ceiling:
    """flops, bandwidth: peak of the machine in FLOP/s and bytes/s. flops_per_token: of the model, about twice its
    parameters. step_bytes: read by every step, about the size of the weights. None where unknown."""

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
        """These numbers, with the newer ones where there are any."""
        return Ceiling(**{f.name: getattr(newer, f.name) or getattr(self, f.name) for f in fields(self)})

    def tokens_per_ms(self) -> float | None:
        """Most tokens per ms that the arithmetic allows."""
        if self.flops is None or self.flops_per_token is None:
            return None
        return self.flops / self.flops_per_token * PER_MS

    def floor_ms(self) -> float | None:
        """Least ms of any step: its bytes must be read."""
        if self.bandwidth is None or self.step_bytes is None:
            return None
        return self.step_bytes / self.bandwidth / PER_MS


class CeilingShare(Record, frozen=True):
    """Fitted peak and fastest step inside the measured range, beside the machine's; shares as fractions, None where
    unknown. A share above 1 means that one of the numbers is wrong."""

    fitted_tokens_per_ms: float
    ceiling_tokens_per_ms: float | None
    peak_share: float | None
    fitted_fastest_ms: float
    floor_ms: float | None
    floor_share: float | None


def beside_the_fit(ceiling: Ceiling, fit: FitResult) -> CeilingShare:
    """The fitted peak throughput and fastest step on a geometric grid over the measured box, against the ceiling."""
    B, S = _box(fit.domain)
    times = fit.latency_ms(B, S)
    peak, fastest = float((S / times).max()), float(times.min())
    rate, floor = ceiling.tokens_per_ms(), ceiling.floor_ms()
    return CeilingShare(
        peak, rate, None if rate is None else peak / rate, fastest, floor, None if floor is None else floor / fastest
    )


def _box(domain: Mapping[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    (B_low, B_high), (S_low, S_high) = domain["B"], domain["S"]
    B = np.unique(np.round(np.geomspace(max(B_low, 1), B_high, 60)))
    S = np.unique(np.round(np.geomspace(max(S_low, 1), S_high, 120)))
    grid_B, grid_S = (axis.ravel() for axis in np.meshgrid(B, S))
    kept = grid_S >= grid_B
    if not kept.any():
        return np.array([float(B_low)]), np.array([float(max(S_high, B_low))])
    return grid_B[kept], grid_S[kept]
