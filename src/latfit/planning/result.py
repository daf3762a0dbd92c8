"""Plan: the decisions, what bound them, and what could not be said and why. Durations in ms, rates in requests/s."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from latfit.planning.fit_quality import FitQuality
from latfit.units import format_ms, format_rate
from latfit.warning import LatfitWarning

NEEDS_RATE = "needs an arrival rate: --rate"
NEEDS_LOAD = "needs an arrival rate: --rate, or a recorded load: --arrivals"
NEEDS_PATHS = "needs two execution paths"
FALLS_BACK = "needs two execution paths: a request that waits too long falls back from the GPU to the CPU"

Interval = tuple[float | None, float | None]
"""95 % of what the fits' draws allow; an end is None where it is "never"."""


class Reach(Enum):
    """For which of the measured sizes something holds: from one on (or between some), for all, for none; or that cannot
    be told."""

    FROM = "from"
    ALWAYS = "always"
    NEVER = "never"
    UNKNOWN = "unknown"


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
    reach: Reach = Reach.FROM


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

    value: the recommended T_cut in ms, None where none meets the SLA.  bound: what backs it: "rigorous" (proved),
    "exact" (the distribution by matrices), "simulated" (the queues run with the measured scatter).  ranges: T_cut that
    meet the SLA, by method.  bounds_ms: the percentile at `value` (where there is none, at `safest_ms`) by method;
    "poisson" is the textbook formula.  holds: the methods whose number is a valid bound or the distribution itself.
    safest_ms: T_cut with the least percentile.
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
        """The T_cut that the other numbers are for."""
        return self.safest_ms if self.value is None else self.value

    @property
    def admitted(self) -> Sequence[tuple[float, float]]:
        """T_cut that meet the SLA by the distribution itself: exact, or simulated where steps scatter."""
        return self.ranges.get("exact", self.ranges.get("simulated", ()))

    @property
    def misled(self) -> bool:
        """Whether the textbook formula admits what misses the SLA, or refuses what meets it."""
        textbook, exact = self.ranges.get("poisson", ()), self.admitted
        ends = [spans[-1][1] if spans else 0.0 for spans in (textbook, exact)]
        return bool(textbook) != bool(exact) or ends[0] > ends[1] * 1.01


class Kind(Enum):
    """How a strategy forms batches."""

    ONE_AT_A_TIME = "one at a time"
    GREEDY = "greedy batches"
    AMORTISED = "amortised batches"
    CUTOFF = "T_cut"


@dataclass(frozen=True)
class Strategy:
    """How a load is served: paths by their labels, the GPU first; T_cut_ms: where waiting for the GPU is cut off;
    batch: that amortised batches wait for, at the plan's rate."""

    kind: Kind
    paths: tuple[str, ...]
    T_cut_ms: float | None = None
    batch: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        on = " + ".join(self.paths)
        return f"{on}, {self.kind.value}" if self.T_cut_ms is None else f"{on}, T_cut {format_ms(self.T_cut_ms)}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "kind": self.kind.value, "paths": list(self.paths)}


@dataclass(frozen=True)
class Alternative:
    """A strategy at the plan's rate: its percentile and mean in ms, the margin to the SLA as a share of it, the highest
    rate that meets the SLA, and why it was selected or not. None where the load is unstable or a number is not known.

    feasible_per_s: ranges of the rate that meet the SLA; one that begins at 0 has no lower end.  source: "simulated"
    (the queue run with the scatter of the fit and the arrivals as they come) or "exact" (a closed form, where
    nothing scatters or only closed forms were asked for).
    """

    strategy: Strategy
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
    source: str | None = None

    @property
    def name(self) -> str:
        return self.strategy.name


@dataclass(frozen=True)
class Capacity:
    """What load the chosen strategy carries on one replica; rates in requests/s for one replica unless said.

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
class EngineChoice:
    """One row of the trade-off: more sequences, or a shorter wait for the first token.

    Parameters
    ----------
    chunk_tokens
        Prefill tokens of a step in which all other sequences decode.
    ttft_ms
        Of the plan's prompt in such chunks, without waiting.
    decode_tokens_per_s
        Of steps in which all sequences decode.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    ttft_ms: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Settings:
    """Limits for a serving engine, from the fit of `path`, without a sweep.

    Parameters
    ----------
    max_num_batched_tokens, chunk_tokens
        Tokens of a step, and prefill tokens beside the decoding requests; None if no steps of that size were measured.
    min_num_batched_tokens
        The fewest that still keep the TTFT target; None without one.
    ttft_ms, tpot_ms
        What these settings give to a prompt of `prompt_tokens` without waiting, at the plan's percentile of steps.
    choices
        The trade-off, by token budget; the settings are one of its rows.
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


@dataclass(frozen=True, repr=False)
class StepPlan:
    """Which steps meet the SLA on their own. percentile: the share of them that does, in percent; None where the fits
    only know the typical step.  fastest_ms: the fastest step there is on any path, at that percentile.  doubts: steps
    of which the fits cannot say whether they meet it."""

    percentile: float | None
    S_at_B: Sequence[TokenRange]
    B_at_S: Sequence[BatchRange]
    fastest_ms: float
    binding: str
    remedy: str
    B1: Threshold
    B2: Threshold
    B1_tokens: Threshold | Unknown
    knee: Threshold | Unknown
    doubts: Sequence[Doubt]

    @property
    def feasible(self) -> bool:
        return bool(self.S_at_B or self.B_at_S)

    def __repr__(self) -> str:
        return f"<StepPlan: B1 {self.B1.value}, B2 {self.B2.value}, {len(self.S_at_B)} limits by B>"


@dataclass(frozen=True, repr=False)
class LoadPlan:
    """How to serve a rate. percentile: of responses that meet the SLA, in percent.  promise: "yes", "no", or "in doubt"
    where what the data allow lies on both sides of the SLA, a tail was not seen, or the simulation cannot tell, and
    why_in_doubt then says which.  interval_ms: 95 % of the percentile over what the data and the run leave open, None
    where that is nothing.
    checked: what the event simulation of the decision found, None where there is no decision or only closed forms
    were asked for."""

    rate_per_s: float
    percentile: float
    alternatives: Sequence[Alternative]
    T_cut: Unknown | Cutoff
    capacity: Unknown | Capacity
    B1: Threshold | Unknown
    rules: Sequence[RuleChoice]
    sensitivity: Sequence[Change]
    frontier: Sequence[FrontierPoint]
    binding: str
    remedy: str
    promise: str
    interval_ms: Interval | None
    checked: Mapping[str, Any] | None
    laws_only: bool
    notes: Sequence[str]
    warnings: Sequence[LatfitWarning] = ()
    why_in_doubt: Sequence[str] = ()

    @property
    def chosen(self) -> Alternative | None:
        return next((row for row in self.alternatives if row.chosen), None)

    @property
    def feasible(self) -> bool:
        return self.chosen is not None and self.promise != "no"

    def __repr__(self) -> str:
        name = "no strategy" if self.chosen is None else self.chosen.name
        return f"<LoadPlan of {format_rate(self.rate_per_s)}: {name}, promise: {self.promise}>"


@dataclass(frozen=True, repr=False)
class Plan:
    """What to do under an SLA in ms: for steps, and for a load where there is one.

    answer: the plan in one or two sentences.  warnings: what to do something about, the most important first.  notes:
    what was assumed.  unsupported: why it is not supported by the data, empty where it is.
    engines: the settings under the names that serving engines use.  nominal: numbers of paths that were not measured.
    engines_path: the path that these are of.  fits: what each path rests on.
    """

    sla_ms: float
    tokens_per_request: int
    steps: StepPlan
    load: LoadPlan | None
    settings: Unknown | Settings
    engines: Mapping[str, Mapping[str, Any]]
    answer: str
    warnings: Sequence[LatfitWarning]
    notes: Sequence[str]
    unsupported: Sequence[str]
    nominal: Mapping[str, str]
    ceilings: Mapping[str, Any]
    both_paths: bool
    fits: Sequence[FitQuality] = ()
    engines_path: str = ""

    @property
    def _decides(self) -> StepPlan | LoadPlan:
        return self.steps if self.load is None else self.load

    @property
    def feasible(self) -> bool:
        """Whether the SLA can be met."""
        return self._decides.feasible

    @property
    def binding(self) -> str:
        """What limits it."""
        return self._decides.binding

    @property
    def remedy(self) -> str:
        """What would make it feasible; empty where it is."""
        return self._decides.remedy

    @property
    def percentile(self) -> float | None:
        """Of steps, or with a rate of responses, in percent; None for the typical step."""
        return self._decides.percentile

    @property
    def promise(self) -> str:
        """yes, no or in doubt."""
        found = self.load.promise if self.load is not None else "yes" if self.steps.feasible else "no"
        return "in doubt" if self.unsupported and found == "yes" else found

    @property
    def why_in_doubt(self) -> Sequence[str]:
        return [*self.unsupported, *(() if self.load is None else self.load.why_in_doubt)]

    @property
    def B1(self) -> Threshold:
        """With a rate, with the wait that it makes at the GPU; the same number wherever the plan is shown."""
        at_rate = None if self.load is None else self.load.B1
        return at_rate if isinstance(at_rate, Threshold) else self.steps.B1

    @property
    def rate_per_s(self) -> float | None:
        return None if self.load is None else self.load.rate_per_s

    @property
    def alternatives(self) -> Sequence[Alternative]:
        return () if self.load is None else self.load.alternatives

    @property
    def T_cut(self) -> Unknown | Cutoff:
        if self.load is not None:
            return self.load.T_cut
        return Unknown(NEEDS_RATE if self.both_paths else FALLS_BACK)

    @property
    def capacity(self) -> Unknown | Capacity:
        return Unknown(NEEDS_LOAD) if self.load is None else self.load.capacity

    def __repr__(self) -> str:
        return f"<Plan: {self.answer}>"

    def to_json(self) -> dict[str, Any]:
        """Keys are a contract: see `docs/formats.md`."""
        steps, load = self.steps, self.load
        return {
            "sla_ms": self.sla_ms,
            "percentile": self.percentile,
            "tokens_per_request": self.tokens_per_request,
            "feasible": self.feasible,
            "promise": self.promise,
            "answer": self.answer,
            "binding": self.binding,
            "remedy": self.remedy,
            "why_in_doubt": list(self.why_in_doubt),
            "warnings": [warning.to_json() for warning in self.warnings],
            "notes": list(self.notes),
            "unsupported": list(self.unsupported),
            "rate_per_s": self.rate_per_s,
            "interval_ms": None if load is None else load.interval_ms,
            "strategies": [{**_plain(row), **row.strategy.to_json()} for row in self.alternatives],
            "capacity": _plain(self.capacity),
            "checked": None if load is None else load.checked,
            "T_cut_ms": _plain(self.T_cut),
            "B1": _plain(steps.B1),
            "B1_at_rate": _plain(Unknown(NEEDS_RATE) if load is None else load.B1),
            "B1_tokens": _plain(steps.B1_tokens),
            "B2": _plain(steps.B2),
            "knee": _plain(steps.knee),
            "rules": _plain(() if load is None else load.rules),
            "sensitivity": _plain(() if load is None else load.sensitivity),
            "frontier": _plain(() if load is None else load.frontier),
            "fastest_ms": steps.fastest_ms,
            "inverse": {"S_at_B": _plain(steps.S_at_B), "B_at_S": _plain(steps.B_at_S)},
            "steps_in_doubt": _plain(steps.doubts),
            "settings": _plain(self.settings),
            "engines": self.engines,
            "engines_path": self.engines_path,
            "fits": [each.to_json() for each in self.fits],
            "nominal": self.nominal,
            "ceilings": self.ceilings,
        }


def _plain(value: Any) -> Any:
    """A record as a JSON object: a strategy by its name, what is an Enum left out."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not is_dataclass(value):
        return dict(value) if isinstance(value, Mapping) else value
    pairs = {each.name: getattr(value, each.name) for each in fields(value)}
    named = {"name" if name == "strategy" else name: each for name, each in pairs.items()}
    return {
        name: each.name if isinstance(each, Strategy) else _plain(each)
        for name, each in named.items()
        if not isinstance(each, Enum)
    }
