"""Plan: the decisions, what bound them, and what could not be said and why. Durations in ms, rates in requests/s."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Interval = tuple[float | None, float | None]
"""95 % of what the fits' draws allow; an end is None where it is "never"."""


@dataclass(frozen=True)
class Threshold:
    """A number (of requests, of tokens) from which something holds; None with the reason where it never holds.

    wins: the stretches (first, last) for which it holds.  interval: 95 % over the fits' draws, None where a fit keeps
    none.  never_share: share of the draws in which it never holds.
    """

    value: int | None
    reason: str
    wins: Sequence[tuple[int, int]] = ()
    interval: Interval | None = None
    never_share: float | None = None


@dataclass(frozen=True)
class Unknown:
    """A quantity that this plan cannot give, with the reason."""

    reason: str
    value: None = None


@dataclass(frozen=True)
class TokenRange:
    """At B requests a step of S_min to S_max tokens meets the SLA; S_max None: any number of tokens does.

    extrapolated: the range's end lies outside the steps that were measured.  S_promised: up to here the SLA is met by
    97.5 % of the curves that the data allow; None without draws, or where no step is that sure.
    """

    path: str
    B: int
    S_min: int
    S_max: int | None
    extrapolated: bool
    S_promised: int | None = None


@dataclass(frozen=True)
class BatchRange:
    """At S tokens a step of B_min to B_max requests meets the SLA."""

    path: str
    S: int
    B_min: int
    B_max: int | None
    extrapolated: bool


@dataclass(frozen=True)
class RuleChoice:
    """A batching rule at the plan's rate on a path alone: its stopping batch, mean response, and by what share that
    exceeds the optimum's (None where the optimum could not be computed)."""

    path: str
    rule: str
    batch: int
    mean_ms: float | None
    excess: float | None


@dataclass(frozen=True)
class Cutoff:
    """How long a request may wait for the GPU before it goes to the CPU's queue.

    value: the recommended T_cut in ms, None where none meets the SLA.  bound: what vouches for it: "rigorous" (proved),
    "exact" (the law by matrices), "simulated" (the queues run with the measured scatter).  ranges: T_cut that meet the
    SLA, by method.  bounds_ms: the percentile at `value` (where there is none, at `safest_ms`) by method; "poisson" is
    the customary formula.  holds: the methods whose number is a valid bound or the law itself.  safest_ms: T_cut with
    the least percentile.
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
    amx_rate_per_s: float
    service: Mapping[str, Any]

    @property
    def shown_ms(self) -> float:
        """The T_cut that the other numbers are for."""
        return self.safest_ms if self.value is None else self.value

    @property
    def granted(self) -> Sequence[tuple[float, float]]:
        """T_cut that meet the SLA by the law itself: exact, or simulated where steps scatter."""
        return self.ranges.get("exact", self.ranges.get("simulated", ()))

    @property
    def misled(self) -> bool:
        """Whether the customary formula promises what the law denies, or denies what it grants."""
        customary, exact = self.ranges.get("poisson", ()), self.granted
        ends = [spans[-1][1] if spans else 0.0 for spans in (customary, exact)]
        return bool(customary) != bool(exact) or ends[0] > ends[1] * 1.01


@dataclass(frozen=True)
class Alternative:
    """A way to run the load: its percentile and mean in ms, the margin to the SLA as a share of it, the highest rate
    that meets the SLA, and why it was taken or not. None where the load is unstable or a number is not known.

    feasible_per_s: ranges of the rate that meet the SLA; one that begins at 0 has no lower end.
    """

    name: str
    percentile_ms: float | None
    mean_ms: float | None
    margin: float | None
    rate_limit_per_s: float | None
    sustainable_per_s: float | None
    utilisation: float | None
    goodput_per_s: float | None
    replicas: int | None
    price_per_hour: float | None
    chosen: bool
    verdict: str
    feasible_per_s: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Capacity:
    """What load the chosen system carries on one machine; rates in requests/s for one replica unless said.

    sustainable: with the SLA kept by what the fit says; promised: also at the slow end of what the data leave open,
    None where that cannot be told.  headroom: sustainable over the rate, minus 1.  replicas: for the whole rate.
    schedule: (start s, rate, replicas) of a load that varies.
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
    load: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Change:
    """What a change of the machine or the load does."""

    change: str
    B1: int | None
    percentile_ms: float | None
    sustainable_per_s: float | None
    replicas: int | None


@dataclass(frozen=True)
class Settings:
    """Limits for a serving engine, from the fit of `path`, without a sweep.

    max_num_batched_tokens: tokens of a step; min_num_batched_tokens: the fewest that still meet the TTFT target, None
    where there is no such target; chunk_tokens: prefill tokens a step beside the decoding requests.  ttft_ms, tpot_ms:
    what these settings give to a prompt of `prompt_tokens` without waiting, at the plan's percentile of steps.
    """

    path: str
    max_num_seqs: int
    max_num_batched_tokens: int | None
    min_num_batched_tokens: int | None
    chunk_tokens: int | None
    prompt_tokens: int
    ttft_ms: float | None
    tpot_ms: float
    binding: str
    reason: str
    extrapolated: bool


@dataclass(frozen=True)
class Doubt:
    """A step for which the fit cannot say whether it meets the SLA: the chance that it does, and its 95 % interval."""

    path: str
    B: int
    S: int
    chance: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class FrontierPoint:
    """An operating point; best: none is at least as good in every respect. cost: the objective's, None without one."""

    name: str
    rate_per_s: float
    T_cut_ms: float | None
    percentile_ms: float
    mean_ms: float
    goodput_per_s: float
    cost: float | None
    best: bool


@dataclass(frozen=True)
class Plan:
    """What to do under an SLA.

    percentile: the share of steps that meets it, in percent; None where the fits only know the typical step. feasible:
    whether it can be met.  binding: what limits it.  answer: the plan in one or two sentences. fastest_ms: the fastest
    step there is on any path, at that percentile.  remedy: what would make it feasible. promise: "yes", "no", or "in
    doubt" where what the data allow lies on both sides of the SLA, or a tail was not seen; interval_ms: 95 % of the
    percentile at the plan's rate over what the data and the simulation leave open, None where that is nothing.
    unsupported: why the answer is not supported by the data, empty where it is.  engines: the settings under the names
    that serving engines use.
    """

    sla_ms: float
    percentile: float | None
    tokens_per_request: int
    B1: Threshold
    B2: Threshold
    T_cut: Unknown | Cutoff
    S_at_B: Sequence[TokenRange]
    B_at_S: Sequence[BatchRange]
    feasible: bool
    binding: str
    answer: str
    fastest_ms: float
    notes: Sequence[str] = ()
    settings: Unknown | Settings = field(default_factory=lambda: Unknown("not asked for"))
    capacity: Unknown | Capacity = field(default_factory=lambda: Unknown("needs an arrival rate: --rate"))
    remedy: str = ""
    rate_per_s: float | None = None
    B1_tokens: Threshold | Unknown = field(default_factory=lambda: Unknown("needs two execution paths"))
    knee: Threshold | Unknown = field(default_factory=lambda: Unknown("needs a path"))
    rules: Sequence[RuleChoice] = ()
    alternatives: Sequence[Alternative] = ()
    sensitivity: Sequence[Change] = ()
    frontier: Sequence[FrontierPoint] = ()
    doubts: Sequence[Doubt] = ()
    quoted: Mapping[str, str] = field(default_factory=dict)
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    checked: Mapping[str, Any] | None = None
    B1_at_rate: Threshold | Unknown = field(default_factory=lambda: Unknown("needs an arrival rate: --rate"))
    promise: str = "yes"
    interval_ms: Interval | None = None
    unsupported: Sequence[str] = ()
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        whole = asdict(self)
        inverse = {"S_at_B": whole.pop("S_at_B"), "B_at_S": whole.pop("B_at_S")}
        waiting = whole.pop("T_cut")
        return {**whole, "T_cut_ms": waiting, "inverse": inverse}
