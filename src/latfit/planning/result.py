"""The record of a plan. Durations in ms, rates in requests/s."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import msgspec

from latfit.hardware import CPU_PATHS, GPU_PATHS
from latfit.messages import Message
from latfit.planning.engine_names import Flags
from latfit.planning.fit_quality import FitQuality
from latfit.planning.verdict import Verdict, upgraded
from latfit.records import Count, Record, Seconds
from latfit.units import format_ms, format_rate

NEEDS_RATE = "needs an arrival rate: --rate"
NEEDS_LOAD = "needs an arrival rate: --rate, or a recorded load: --arrivals"
NEEDS_PATHS = "needs two execution paths"
FALLS_BACK = "needs two execution paths: a request that waits too long falls back from the GPU to the CPU"

Interval = tuple[float | None, float | None]
"""95 %; an end is None where there is none."""


class Reach(Enum):
    """For which measured sizes something holds."""

    FROM = "from"
    ALWAYS = "always"
    NEVER = "never"
    UNKNOWN = "unknown"


class Threshold(Record, frozen=True):
    """A number from which something holds; None where it never does.

    wins: ranges (first, last). interval, never_share: 95 %, and never, over the fits' draws.
    """

    value: int | None
    reason: str
    wins: Sequence[tuple[int, int]] = ()
    interval: Interval | None = None
    never_share: float | None = None
    reach: Reach = Reach.FROM


@dataclass(frozen=True)
class Unknown:
    reason: str
    value: None = None


class TokenRange(Record, frozen=True):
    """At B requests a step of S_min to S_max tokens (None: any number) meets the SLA.

    S_promised: up to here 97.5 % of the fit's draws meet the SLA.
    """

    path: str
    B: int
    S_min: int
    S_max: int | None
    extrapolated: bool
    S_promised: int | None = None


class BatchRange(Record, frozen=True):
    path: str
    S: int
    B_min: int
    B_max: int | None
    extrapolated: bool


class Cutoff(Record, frozen=True):
    """How long a request may wait for the GPU before it goes to the CPU's queue.

    value: T_cut in ms, None if none meets the SLA. ranges: feasible T_cut. bounds_ms: the percentile at `value`, else
    at `safest_ms`.
    """

    value: float | None
    bound: str | None
    reason: str
    binding: str
    percentile: float
    bounds_ms: Mapping[str, float | None]
    holds: Sequence[str]
    ranges: Mapping[str, Sequence[tuple[float, float]]]
    safest_ms: float
    overflow_share: float
    mean_ms: float
    cpu_rate_per_s: float
    service: Mapping[str, Any]

    @property
    def shown_ms(self) -> float:
        return self.safest_ms if self.value is None else self.value


class Kind(Enum):
    """How a strategy forms batches."""

    ONE_AT_A_TIME = "one at a time"
    GREEDY = "greedy batches"
    AMORTISED = "amortised batches"
    CUTOFF = "T_cut"


@dataclass(frozen=True)
class Strategy:
    """How a load is served: labels of the paths, the GPU first. batch: of amortised batches."""

    kind: Kind
    paths: tuple[str, ...]
    T_cut_ms: float | None = None
    batch: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        on = " + ".join(self.paths)
        return f"{on}, {self.kind.value}" if self.T_cut_ms is None else f"{on}, T_cut {format_ms(self.T_cut_ms)}"


class Alternative(Record, frozen=True, kw_only=True):
    """A strategy at the plan's rate. None where the load is unstable.

    margin: to the SLA, as a share of it. sustainable_per_s, feasible_per_s: highest rate, and ranges, that meet it.
    """

    name: str
    kind: Kind
    paths: tuple[str, ...]
    T_cut_ms: Seconds | None = None
    batch: Count | None = None
    percentile_ms: float | None = None
    mean_ms: float | None = None
    margin: float | None = None
    rate_limit_per_s: float | None = None
    sustainable_per_s: float | None = None
    utilisation: float | None = None
    goodput_per_s: float | None = None
    replicas: int | None = None
    price_per_hour: float | None = None
    chosen: bool = False
    verdict: str = ""
    feasible_per_s: Sequence[tuple[float, float]] = ()
    source: str | None = None

    def __post_init__(self) -> None:
        if len(self.paths) != (1 if self.T_cut_ms is None else 2):
            raise ValueError(f"a strategy on {len(self.paths)} paths")


class Capacity(Record, frozen=True):
    """Load of the best strategy on one replica.

    promised: also at the slow end of what the data leave open. replicas: for the whole rate.
    """

    system: str
    rate_per_s: float
    sustainable_per_s: float | None
    utilisation: float | None
    goodput_per_s: float | None
    replicas: int | None
    headroom: float | None
    binding: str
    price_per_hour: float | None = None
    price_per_million: float | None = None
    promised_per_s: float | None = None
    load: Any = None  # of earlier versions

    @property
    def shown(self) -> str:
        return format_rate(self.sustainable_per_s or 0.0, down=True, planned_per_s=self.rate_per_s)


class Change(Record, frozen=True):
    change: str
    B1: int | None
    percentile_ms: float | None
    sustainable_per_s: float | None
    replicas: int | None


class EngineChoice(Record, frozen=True):
    """A choice of sequences and budget. chunk_tokens: prefill tokens beside all other sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    ttft_ms: float
    decode_tokens_per_s: float


class Settings(Record, frozen=True):
    """Limits for a serving engine, from the fit of `path`.

    max_num_batched_tokens, chunk_tokens: None if no such steps were measured. min_num_batched_tokens: the fewest that
    keep TTFT. ttft_ms, tpot_ms: without waiting.
    """

    path: str
    max_num_seqs: int
    prompt_tokens: int
    tpot_ms: float
    binding: str
    reason: str
    max_num_batched_tokens: int | None = None
    min_num_batched_tokens: int | None = None
    chunk_tokens: int | None = None
    ttft_ms: float | None = None
    extrapolated: bool = False
    choices: tuple[EngineChoice, ...] = ()


class Doubt(Record, frozen=True):
    path: str
    B: int
    S: int
    chance: float
    low_ms: float
    high_ms: float


class Inverse(Record, frozen=True):
    S_at_B: Sequence[TokenRange]
    B_at_S: Sequence[BatchRange]


UNKNOWABLE = ("capacity", "T_cut_ms", "B1_at_rate", "settings")


class Plan(Record, frozen=True, kw_only=True):
    """What to do under an SLA: for steps, and for a load if there is one.

    percentile: None for the typical step. capacity, T_cut, B1_at_rate, settings: None if `unknown` has the reason.
    B1_idle: without the wait at the GPU. engines: settings of `engines_path` by engine.
    """

    what: ClassVar[str] = "plan"
    made_by: ClassVar[str] = "latfit plan --out plan.json"

    sla_ms: float
    percentile: float | None
    tokens_per_request: Count
    feasible: bool
    promise: Verdict
    probability: float | None = None
    answer: str
    binding: str
    remedy: str = ""
    why_in_doubt: Sequence[str] = ()
    warnings: Sequence[Message] = ()
    notes: Sequence[str] = ()
    unsupported: Sequence[str] = ()
    rate_per_s: float | None = None
    interval_ms: Interval | None = None
    strategies: Sequence[Alternative] = ()
    capacity: Capacity | None = None
    checked: Any = None  # of earlier versions
    T_cut: Cutoff | None = msgspec.field(name="T_cut_ms", default=None)
    B1_idle: Threshold = msgspec.field(name="B1")
    B1_at_rate: Threshold | None = None
    B1_tokens: Threshold
    B2: Threshold
    knee: Threshold
    rules: Sequence[Any] = ()  # of earlier versions
    sensitivity: Sequence[Change] = ()
    frontier: Sequence[Any] = ()  # of earlier versions
    fastest_ms: float
    inverse: Inverse
    steps_in_doubt: Sequence[Doubt] = ()
    settings: Settings | None = None
    engines: Mapping[str, Flags] = {}
    engines_path: str = ""
    fits: Sequence[FitQuality] = ()
    nominal: Mapping[str, str] = {}
    ceilings: Mapping[str, Any] = {}
    unknown: Mapping[str, str] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the keys of `docs/formats.md`; an unknown value is an object with the reason."""
        found = super().to_json()
        reasons = found.pop("unknown")
        return found | {name: {"reason": reason, "value": None} for name, reason in reasons.items()}

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        values = {name: document[name] for name in UNKNOWABLE}
        unknown = {name: each["reason"] for name, each in values.items() if {"reason", "value"} == set(each)}
        return upgraded({**document, **dict.fromkeys(unknown), "unknown": unknown})

    @property
    def B1(self) -> Threshold:
        return self.B1_at_rate or self.B1_idle

    @property
    def doubts(self) -> Sequence[str]:
        """Why the answer is not confirmed, beside what does not support it."""
        return self.why_in_doubt[len(self.unsupported) :]

    @property
    def S_at_B(self) -> Sequence[TokenRange]:
        return self.inverse.S_at_B

    @property
    def B_at_S(self) -> Sequence[BatchRange]:
        return self.inverse.B_at_S

    @property
    def chosen(self) -> Alternative | None:
        return next((row for row in self.strategies if row.chosen), None)

    @property
    def both_paths(self) -> bool:
        return all(any(each.path in paths for each in self.fits) for paths in (CPU_PATHS, GPU_PATHS))

    def __repr__(self) -> str:
        return f"<Plan: {self.answer}>"
