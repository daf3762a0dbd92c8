"""The part of a plan's JSON that exports read, typed.

A plan's file may have been edited by hand or written by another version, so every value is checked before it reaches a
file that another program runs.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, field, structs

from latfit.errors import BadInput, FitNotUsable, SlaOutOfReach
from latfit.files import dumps
from latfit.hardware import path_label
from latfit.inputs import decode_json, read_json
from latfit.units import count_text, format_ms, format_percent, format_rate

MADE_BY = "latfit plan --out plan.json"
DIGEST_LETTERS = 12
RATE_DIGITS = 3  # of the highest rate, as `latfit plan` prints it
MAX_COUNT = 2**31 - 1  # the largest integer that engines accept
DAY_S = 86_400.0
MAX_GPUS = 10_000  # a larger number in a trace is no number of GPUs

NOT_EXPORTED = "the replicas of the whole load; the plan's schedule, with fewer at lower load, is not exported."

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0)]
Setting = bool | str | Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | list[Count]
"""-1 is SGLang's word for "no chunks"."""

S = TypeVar("S")


class FitFacts(Struct, frozen=True):
    """A fit that the plan rests on."""

    fit: str
    model: str
    error_pct: float | None
    path: str | None
    error_pct_by_phase: dict[str, float] = {}
    system: dict[str, str] = {}

    @property
    def error(self) -> str:
        """`trace.parquet, roofline, 12 % off on unseen steps (decode 5 %)`."""
        if self.error_pct is None:
            return f"{self.fit}, {self.model}, error not known"
        phases = ", ".join(f"{name} {format_percent(each)}" for name, each in self.error_pct_by_phase.items())
        whole = f"{self.fit}, {self.model}, {format_percent(self.error_pct)} off on unseen steps"
        return f"{whole} ({phases})" if phases else whole

    @property
    def label(self) -> str | None:
        """The path as strategies name it."""
        return self.path and path_label(self.path, nominal=self.model == "nominal")


class Warning(Struct, frozen=True):
    """A message of the plan."""

    message: str
    remedy: str


class PlanFacts(Struct, frozen=True, kw_only=True):
    """What every plan says. flags: settings by engine, under the names that the engine uses; file, digest: of the
    plan's document."""

    feasible: bool
    promise: str
    binding: str
    notes: list[str]
    warnings: list[Warning]
    fits: list[FitFacts]
    flags: dict[str, dict[str, Setting]] = field(name="engines")
    unsupported: list[str] = []
    why_in_doubt: list[str] = []
    file: str
    digest: str

    @property
    def name(self) -> str:
        return f"{self.file} (sha256 {self.digest})"

    @property
    def kind(self) -> str:
        """requests, batches at a rate, or steps."""
        raise NotImplementedError

    @property
    def answer(self) -> str:
        """The plan in a sentence."""
        raise NotImplementedError

    @property
    def condition(self) -> str:
        """What the plan holds for."""
        raise NotImplementedError

    @property
    def path(self) -> str:
        """The execution path of the settings."""
        raise NotImplementedError

    @property
    def used_fits(self) -> Sequence[FitFacts]:
        """The fits that the settings rest on."""
        return self.fits

    @property
    def errors(self) -> str:
        return "; ".join(each.error for each in self.used_fits) or "nominal numbers, nothing measured"

    @property
    def assumed(self) -> list[str]:
        return self.notes

    @property
    def doubts(self) -> list[str]:
        return [*self.why_in_doubt, *(f"{each.message} {each.remedy}" for each in self.warnings)]

    @property
    def system(self) -> dict[str, str]:
        """Facts on which all used fits that state them agree."""
        stated = {(name, value) for each in self.used_fits for name, value in each.system.items()}
        names = [name for name, _ in stated]
        return {name: value for name, value in stated if names.count(name) == 1}

    @property
    def gpus(self) -> int | None:
        """GPUs of a replica; None if unknown."""
        count = self.system.get("tp", "")
        return (int(count) or None) if count.isdecimal() and len(count) < len(str(MAX_GPUS)) else None


class TargetFacts(Struct, frozen=True):
    """A latency target in ms, or a goodput target as the share of requests in percent that miss their limits."""

    target: str = ""
    value_ms: float = 0.0
    limit_ms: float = 0.0
    value_pct: float = 0.0
    limit_pct: float | None = None

    @property
    def outcome(self) -> str:
        """`p99 TTFT 1.01 s of 2 s`."""
        if self.limit_pct is None:
            return f"{self.target} {format_ms(self.value_ms)} of {format_ms(self.limit_ms)}"
        return f"{100 - self.value_pct:.4g} % of requests meet all limits, {100 - self.limit_pct:.4g} % asked"

    @property
    def limit(self) -> str:
        """`p99 TTFT within 2 s`."""
        if self.limit_pct is None:
            return f"{self.target} within {format_ms(self.limit_ms)}"
        return f"{100 - self.limit_pct:.4g} % of requests within all limits"


class ReplicaFacts(Struct, frozen=True):
    """The number of replicas."""

    value: Count


class EngineFacts(Struct, frozen=True):
    """The simulated engine. prefix_hit_rate: None if recorded contents of prompts say what is cached."""

    order: str
    kv_blocks: Count
    block_size: Count
    prefix_hit_rate: float | None


class WindowFacts(Struct, frozen=True):
    """Start of a window of the schedule."""

    t_s: Seconds


class HoursFacts(Struct, frozen=True):
    """Cost of a fixed number of replicas."""

    replica_hours: Seconds


class ScheduleFacts(Struct, frozen=True):
    """Replicas over a recorded day. replicas_at: (start in s, replicas), rising in time."""

    feasible: bool
    replicas_at: list[tuple[Seconds, Count]]
    windows: list[WindowFacts]
    window_s: Seconds
    start_up_s: Seconds
    replica_hours: Seconds
    fixed: HoursFacts

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.replicas_at]
        if not self.windows or starts[:1] != [0.0] or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError("replicas_at does not rise from 0 on")

    @property
    def span_s(self) -> float:
        return self.windows[-1].t_s + self.window_s

    @property
    def over_a_day(self) -> bool:
        return self.span_s > DAY_S


class PairFacts(Struct, frozen=True):
    """Replicas for prefill and replicas for decode. transfer_ms: of keys and values, fixed and per token."""

    feasible: bool
    prefill_replicas: Natural
    replicas: Natural
    transfer_ms: tuple[Seconds, Seconds]
    targets: list[TargetFacts]
    highest_rate_per_s: float | None
    flags: dict[str, dict[str, Setting]] = field(name="engines", default_factory=dict)


class RequestPlanFacts(PlanFacts, frozen=True, kw_only=True):
    """A plan of replicas for requests with prompts and outputs. deployment: the replicas in words."""

    request: str
    rate_per_s: float
    users: int | None
    targets: list[TargetFacts]
    replicas: ReplicaFacts
    engine: EngineFacts
    route: str
    kv_cache: str | None
    highest_rate_per_s: float | None
    steps_may_be_slower_pct: float | None
    tensor_parallel: Count | None = None
    schedule: ScheduleFacts | None = None
    prefill_apart: PairFacts | None = None
    deployment: str = ""

    @property
    def kind(self) -> str:
        return "requests"

    @property
    def load(self) -> str:
        return format_rate(self.rate_per_s) if self.users is None else f"{self.users} users"

    @property
    def replica_text(self) -> str:
        return self.deployment or count_text(self.replicas.value, "replica")

    @property
    def answer(self) -> str:
        doubt = "" if self.promise == "yes" else "In doubt: "
        outcome = ", ".join(each.outcome for each in self.targets)
        return f"{doubt}{self.replica_text} for {self.load} ({self.request}): {outcome}."

    @property
    def condition(self) -> str:
        limits = ", ".join(each.limit for each in self.targets)
        text = f"{limits} at {self.load} over {self.replica_text}"
        if self.highest_rate_per_s is not None:
            text += f", and up to {format_rate(self.highest_rate_per_s, down=True, digits=RATE_DIGITS)}"
        text += f" ({self.request})"
        if self.steps_may_be_slower_pct is not None:
            text += f"; steps may be {format_percent(self.steps_may_be_slower_pct)} slower"
        return text

    @property
    def path(self) -> str:
        return next((found for each in self.fits if (found := each.system.get("path") or each.path)), "gpu")

    @property
    def gpus(self) -> int | None:
        return self.tensor_parallel or super().gpus

    @property
    def assumed(self) -> list[str]:
        return self.notes if self.schedule is None else [*self.notes, NOT_EXPORTED]

    @property
    def kv_tokens(self) -> int | None:
        """Size of a replica's KV cache; None if the plan takes it as unlimited."""
        return None if self.kv_cache is None else self.engine.kv_blocks * self.engine.block_size

    @property
    def day(self) -> ScheduleFacts | None:
        return self.schedule if self.schedule is not None and self.schedule.feasible else None

    @property
    def pair(self) -> PairFacts | None:
        found = self.prefill_apart
        return found if found is not None and found.feasible and "vllm" in found.flags else None

    def with_pair(self, pair: PairFacts) -> "RequestPlanFacts":
        """The same load on replicas that prefill and replicas that decode."""
        return structs.replace(
            self,
            promise="yes",
            targets=pair.targets,
            highest_rate_per_s=pair.highest_rate_per_s,
            steps_may_be_slower_pct=None,
            flags={**self.flags, "vllm": pair.flags["vllm"]},
            deployment=f"{count_text(pair.prefill_replicas, 'replica')} that prefill and {pair.replicas:,} that decode",
        )


class ThresholdFacts(Struct, frozen=True):
    """A batch from which something holds."""

    value: Count | None = None


class CapacityFacts(Struct, frozen=True):
    """The highest rate of a replica; None if unknown."""

    sustainable_per_s: float | None = None


class StrategyFacts(Struct, frozen=True):
    """How a load of batches is served, or could be. paths: labels, the GPU first."""

    kind: str
    name: str
    paths: list[str]
    T_cut_ms: Seconds | None
    percentile_ms: float | None
    chosen: bool

    def __post_init__(self) -> None:
        if len(self.paths) != (1 if self.T_cut_ms is None else 2):
            raise ValueError(f"a strategy on {len(self.paths)} paths")


class BatchPlanFacts(PlanFacts, frozen=True, kw_only=True):
    """A plan of steps or, with a rate, of batches."""

    sla_ms: float
    percentile: float | None
    rate_per_s: float | None
    tokens_per_request: Count
    text: str = field(name="answer")
    engines_path: str
    strategies: list[StrategyFacts]
    capacity: CapacityFacts
    B1: ThresholdFacts
    B1_at_rate: ThresholdFacts
    B2: ThresholdFacts
    knee: ThresholdFacts

    @property
    def kind(self) -> str:
        return "steps" if self.rate_per_s is None else "batches"

    @property
    def answer(self) -> str:
        return self.text

    @property
    def condition(self) -> str:
        share = "a typical" if self.percentile is None else f"the p{self.percentile:g}"
        if self.rate_per_s is None:
            return f"{share} step within {format_ms(self.sla_ms)}"
        capacity, tokens = self.capacity.sustainable_per_s, count_text(self.tokens_per_request, "token")
        up_to = "" if capacity is None else f", and up to {format_rate(capacity, down=True)}"
        rate = format_rate(self.rate_per_s)
        return f"{share} response within {format_ms(self.sla_ms)} at {rate} a replica{up_to}, requests of {tokens}"

    @property
    def path(self) -> str:
        return self.engines_path

    @property
    def used_fits(self) -> Sequence[FitFacts]:
        chosen = () if self.chosen is None else self.chosen.paths
        return [each for each in self.fits if each.path == self.engines_path or each.label in chosen]

    @property
    def chosen(self) -> StrategyFacts | None:
        return next((each for each in self.strategies if each.chosen), None)

    @property
    def batches_of_note(self) -> list[int]:
        """B1, B2 and the knee."""
        found = (self.B1, self.B1_at_rate, self.B2, self.knee)
        return [each.value for each in found if each.value is not None]

    def path_of(self, label: str) -> str:
        """The name of the path that strategies call by this label."""
        return next((each.path for each in self.fits if each.path is not None and each.label == label), label)


def read_plan(plan: str | Path | Mapping[str, Any]) -> PlanFacts:
    """Return the facts of a plan's file or document.

    Raises
    ------
    BadInput
        If it is no plan, or damaged.
    SlaOutOfReach, FitNotUsable
        If the plan is not feasible, or not supported by its data.
    """
    document, file = _document(plan)
    if not isinstance(document, dict) or not {"feasible", "engines", "promise"} <= set(document):
        raise BadInput("not a plan", where=file, remedy=f"Make one with `{MADE_BY}`.")
    digest = hashlib.sha256(f"{dumps(document)}\n".encode()).hexdigest()[:DIGEST_LETTERS]  # as `--out` writes it
    document |= {"file": file, "digest": digest}
    found = checked(document, PlanFacts, file)
    if not found.feasible:
        raise SlaOutOfReach(
            f"the plan cannot be met: {found.binding}",
            where=file,
            remedy="There are no settings to export. Plan with wider limits, a lower rate or more replicas.",
        )
    if found.unsupported:
        raise FitNotUsable(
            f"the plan is not supported by its data: {found.unsupported[0]}",
            where=file,
            remedy="Measure such steps, or fit a better model (latfit fit), and plan again.",
        )
    return checked(document, RequestPlanFacts if document.get("kind") == "serving" else BatchPlanFacts, file)


def checked(value: Any, kind: type[S], file: str) -> S:
    """Return decoded JSON as a record. Raises BadInput that names the key."""
    try:
        return convert(value, kind)
    except ValidationError as error:
        raise damaged(str(error), file) from None


def damaged(what: str, file: str) -> BadInput:
    return BadInput(f"not a whole plan ({what})", where=file, remedy=f"Make it again with `{MADE_BY}`.")


def _document(plan: str | Path | Mapping[str, Any]) -> tuple[Any, str]:
    """(decoded document, name of its file)."""
    if isinstance(plan, str | Path):
        return read_json(Path(plan), what="plan", made_by=MADE_BY), Path(plan).name
    try:
        return decode_json(dumps(dict(plan)).encode()), "the plan"
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"not a plan ({error})", where="the plan", remedy=f"Make one with `{MADE_BY}`.") from None
