"""What a machine could do at best, compared with its fit.

A step on S tokens takes at least max(S flops_per_token / flops, step_bytes / bandwidth).
"""

import numpy as np
from msgspec import structs

from latfit.errors import refuse
from latfit.model import FitResult
from latfit.records import Record

PER_MS = 1e-3


class Ceiling(Record, frozen=True, omit_defaults=True):
    """Peak in FLOP/s and bytes/s, FLOP of a token, and bytes that every step reads; None: unknown."""

    flops: float | None = None
    bandwidth: float | None = None
    flops_per_token: float | None = None
    step_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, value in structs.asdict(self).items():
            wrong, option = value is not None and not (np.isfinite(value) and value > 0), name.replace("_", "-")
            refuse(wrong, f"{value} is not above zero", f"--{option}", "Give a number above zero.")

    @property
    def known(self) -> bool:
        return self != Ceiling()

    def updated(self, newer: "Ceiling") -> "Ceiling":
        return structs.replace(self, **newer.to_json())


class CeilingShare(Record, frozen=True):
    fitted_tokens_per_ms: float
    ceiling_tokens_per_ms: float | None
    peak_share: float | None
    fitted_fastest_ms: float
    floor_ms: float | None
    floor_share: float | None


def beside_the_fit(ceiling: Ceiling, fit: FitResult) -> CeilingShare:
    """Compare the fitted peak throughput and fastest step over the measured range with the ceiling."""
    B, S = (
        np.unique(np.round(np.geomspace(max(fit.domain[name][0], 1), fit.domain[name][1], points)))
        for name, points in (("B", 60), ("S", 120))
    )
    B, S = (axis.ravel() for axis in np.meshgrid(B, S))
    S = np.maximum(S, B)  # a request has a token
    times = fit.latency_ms(B, S)
    peak, fastest = float((S / times).max()), float(times.min())
    rate = ceiling.flops / ceiling.flops_per_token * PER_MS if ceiling.flops and ceiling.flops_per_token else None
    floor = ceiling.step_bytes / ceiling.bandwidth / PER_MS if ceiling.step_bytes and ceiling.bandwidth else None
    return CeilingShare(peak, rate, rate and peak / rate, fastest, floor, floor and floor / fastest)
