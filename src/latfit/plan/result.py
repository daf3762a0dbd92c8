"""Plan: the decisions, what bound them, and what could not be said yet and why."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Threshold:
    """A batch size from which something holds; value None with the reason where it cannot be said or never holds.

    wins: the batches (first, last) for which it holds, where that is more than "from `value` on".
    """

    value: int | None
    reason: str
    wins: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Unknown:
    """A quantity that this plan cannot give, with the reason."""

    reason: str
    value: None = None


@dataclass(frozen=True)
class TokenRange:
    """At B requests a step of S_min to S_max tokens meets the SLA; S_max None: any number of tokens does.

    extrapolated: the range's end lies outside the steps that were measured.
    """

    path: str
    B: int
    S_min: int
    S_max: int | None
    extrapolated: bool


@dataclass(frozen=True)
class BatchRange:
    """At S tokens a step of B_min to B_max requests meets the SLA."""

    path: str
    S: int
    B_min: int
    B_max: int | None
    extrapolated: bool


@dataclass(frozen=True)
class Plan:
    """What to do under an SLA.

    percentile: the share of steps that meets it, in percent; None where the fits only know the typical step.
    feasible: whether any step meets it.  binding: what limits it.  answer: the plan in one or two sentences.
    fastest_ms: the fastest step there is on any path, at that percentile.
    """

    sla_ms: float
    percentile: float | None
    tokens_per_request: int
    B1: Threshold
    B2: Threshold
    T_cut: Unknown
    S_at_B: Sequence[TokenRange]
    B_at_S: Sequence[BatchRange]
    feasible: bool
    binding: str
    answer: str
    fastest_ms: float
    notes: Sequence[str] = ()
    settings: Unknown | Mapping[str, Any] = field(default_factory=lambda: Unknown("not part of this plan yet"))
    capacity: Unknown | Mapping[str, Any] = field(default_factory=lambda: Unknown("not part of this plan yet"))

    def to_json(self) -> dict[str, Any]:
        whole = asdict(self)
        inverse = {"S_at_B": whole.pop("S_at_B"), "B_at_S": whole.pop("B_at_S")}
        waiting = whole.pop("T_cut")
        return {**whole, "T_cut_ms": waiting, "inverse": inverse}
