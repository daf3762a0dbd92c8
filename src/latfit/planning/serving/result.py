"""The plan of serving engines: the record that `latfit plan --json` prints and `--out` writes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import UNSET, UnsetType, field

from latfit.messages import Message
from latfit.planning.engine_names import Flags, serving_flags
from latfit.planning.fit_quality import FitQuality
from latfit.planning.verdict import CONFIRMED, Verdict, Z, probability_within, upgraded
from latfit.records import Count, Natural, Number, Record, Seconds
from latfit.simulation import EngineSummary
from latfit.stats import student_tail
from latfit.units import count_text, format_ms, format_rate

if TYPE_CHECKING:
    from latfit.simulation import EngineSettings

NEAR_PCT = 0.05  # of a share to its limit, from which more digits are shown
MAX_SPREAD = 1.1  # largest ratio of a time and the ends of its interval at which it counts as precise


class Reached(Record, frozen=True, kw_only=True):
    """A target with what was reached: ms, or percent of requests that miss a limit.

    percentile: of all requests, None for a class or a share. interval: 95 %; None for one run, NaN for an unknown end.
    certain: whether the limit lies outside the interval, or above Cantelli's bound.
    """

    name: str = field(name="target")
    metric: str = ""
    percentile: float | None = None
    interval: tuple[Number, Number] | None = None
    met: bool = True
    certain: bool = True
    value_ms: float | UnsetType = UNSET
    limit_ms: float | UnsetType = UNSET
    value_pct: float | UnsetType = UNSET
    limit_pct: float | UnsetType = UNSET

    @property
    def unit(self) -> str:
        return "ms" if self.value_pct is UNSET else "pct"

    @property
    def value(self) -> float:
        return float(getattr(self, f"value_{self.unit}"))

    @property
    def limit(self) -> float:
        return float(getattr(self, f"limit_{self.unit}"))

    @property
    def low(self) -> float:
        return math.nan if self.interval is None else self.interval[0]

    @property
    def high(self) -> float:
        return math.nan if self.interval is None else self.interval[1]

    @property
    def ratio(self) -> float:
        return self.value / self.limit if self.limit > 0 else math.inf if self.value > 0 else 0.0

    @property
    def precise(self) -> bool:
        if self.unit == "pct" or self.interval is None or self.value <= 0:
            return True
        return self.high <= MAX_SPREAD * self.value and self.low * MAX_SPREAD >= self.value

    @property
    def probability(self) -> float | None:
        """Probability that the target is met; None if the interval has no end on the side of the limit."""
        low, high = (None, None) if self.interval is None else self.interval
        found = probability_within(self.value, low, high, self.limit)
        return CONFIRMED if found is None and self.met and self.certain else found

    @property
    def outcome(self) -> str:
        """`p99 TTFT 1.01 s of 2 s`, with more digits if the two look alike."""
        if self.unit == "pct":
            digits = 4 if abs(self.value - self.limit) > NEAR_PCT else 7
            return f"{100 - self.value:.{digits}g} % of requests meet all limits, {100 - self.limit:.4g} % asked"
        value, limit = format_ms(self.value), format_ms(self.limit)
        return f"{self.name} {value if value != limit else format_ms(self.value, 5)} of {limit}"

    @property
    def condition(self) -> str:
        """`p99 TTFT within 2 s`."""
        if self.unit == "pct":
            return f"{100 - self.limit:.4g} % of requests within all limits"
        return f"{self.name} within {format_ms(self.limit)}"


class Effect(Record, frozen=True):
    change: str
    target: str
    before_ms: float | UnsetType = UNSET
    after_ms: float | UnsetType = UNSET
    before_pct: float | UnsetType = UNSET
    after_pct: float | UnsetType = UNSET

    @property
    def unit(self) -> str:
        return "ms" if self.before_pct is UNSET else "pct"

    @property
    def before(self) -> float:
        return float(getattr(self, f"before_{self.unit}"))

    @property
    def after(self) -> float:
        return float(getattr(self, f"after_{self.unit}"))


class Trade(Record, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    speed_per_s: float = field(name="tokens_per_s_per_user")
    throughput_per_s: float = field(name="tokens_per_s_per_replica")
    best: bool = field(name="planned", default=False)


class Stall(Record, frozen=True):
    """Longest gap between two tokens at a token budget.

    chunk_tokens: prompt tokens of that step. knee: the shortest gap with at least 95 % of the highest throughput.
    """

    max_num_batched_tokens: int
    batching: str
    chunk_tokens: int
    gap_ms: float
    interval_ms: tuple[float, float] | None
    output_tokens_per_s: float
    planned: bool = False
    knee: bool = False


class Stalls(Record, frozen=True):
    prompt_tokens: int
    decoding: int
    choices: Sequence[Stall]

    @property
    def planned(self) -> Stall:
        return next(each for each in self.choices if each.planned)

    @property
    def knee(self) -> Stall:
        return next(each for each in self.choices if each.knee)


class OperatingPoint(Record, frozen=True):
    """A batch at which an engine serves as many requests as come. interval: 95 % over the fit's draws.

    stable: whether the batch returns after a small change. overloaded: whether a queue grows.
    """

    batch: float
    tpot_ms: float
    stable: bool
    overloaded: bool = False
    interval: tuple[float, float] | None = None


class OperatingStates(Record, frozen=True):
    """All operating points of a replica at the planned load, by rising batch.

    from_rate_per_s, to_rate_per_s: loads with several stable points. max_num_seqs: the largest limit with one stable
    point. confirmed: by a simulated burst.
    """

    points: Sequence[OperatingPoint]
    from_rate_per_s: float | None = None
    to_rate_per_s: float | None = None
    max_num_seqs: int | None = None
    confirmed: bool | None = None


class Window(Record, frozen=True):
    t_s: Seconds
    rate_per_s: float
    replicas: Count


class HoursOfReplicas(Record, frozen=True):
    replica_hours: Seconds
    slo_attainment: Number
    price_per_million_tokens: float | None


class SchedulePlan(HoursOfReplicas, frozen=True, kw_only=True):
    """Replicas that come and go. replicas_at: (start in s, count). fixed: with a constant number."""

    feasible: bool
    window_s: Seconds
    start_up_s: Seconds
    windows: Sequence[Window]
    replicas_at: Sequence[tuple[Seconds, Count]]
    targets: Sequence[Reached]
    fixed: HoursOfReplicas

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.replicas_at]
        if not self.windows or starts[:1] != [0.0] or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError("replicas_at does not rise from 0 on")

    @property
    def saved(self) -> float:
        """Share of the replica-hours of the fixed number."""
        return 1 - self.replica_hours / self.fixed.replica_hours

    @property
    def span_s(self) -> float:
        return self.windows[-1].t_s + self.window_s


class EngineOptions(Record, frozen=True, kw_only=True):
    """Options of `latfit simulate engine`. prefix_hit_rate: None if prompt contents were recorded."""

    batching: str = "chunked-prefill"
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    long_prefill_token_threshold: Natural = 0
    kv_blocks: Count
    block_size: Count
    order: str
    synchronous: bool = False
    prefix_hit_rate: float | None

    @property
    def cache_tokens(self) -> int:
        return self.kv_blocks * self.block_size


class PlannedEngines(Record, frozen=True, kw_only=True):
    feasible: bool
    targets: Sequence[Reached] = ()
    engine: EngineOptions | None = None
    engines: Mapping[str, Flags] = {}
    outcome: EngineSummary | None = None
    highest_rate_per_s: float | None = None
    missed_from_rate_per_s: float | None = None
    capacity_per_s: float | None = None
    capacity_interval_per_s: tuple[float, float] | None = None


def settings_of(settings: "EngineSettings", *, contents: bool) -> dict[str, Any]:
    same = ("batching", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
    options = EngineOptions(
        **{name: getattr(settings, name) for name in (*same, "kv_blocks", "block_size")},
        order=settings.order.name,
        synchronous=not settings.asynchronous,
        prefix_hit_rate=None if contents else settings.cached_share,
    )
    return {"engine": options, "engines": serving_flags(settings)}


class ApartPlan(PlannedEngines, frozen=True, kw_only=True):
    """Prefill and decode replicas; if not feasible, a lower bound of each (0: unknown)."""

    prefill_replicas: Natural
    replicas: Natural
    transfer_ms: tuple[Seconds, Seconds]
    price_per_million_tokens: float | None = None

    @property
    def total(self) -> int:
        return self.prefill_replicas + self.replicas


class ReplicaCount(Record, frozen=True):
    """Number of replicas; None if none meets the targets. tried: what the targets' values are of."""

    value: Count | None
    tried: Count | None = None
    one_fewer: Sequence[Reached] = ()
    one_fewer_overloaded: bool = False
    with_the_first_settings: int | None = None


class Cost(Record, frozen=True):
    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    kwh_per_million_tokens: float | None = None


class Work(Record, frozen=True):
    setups: int
    steps: int
    requests: int


class ServingPlan(PlannedEngines, frozen=True, kw_only=True, tag_field="kind", tag="serving"):
    """Replicas that meet the targets of a load of requests, or why none do.

    targets, outcome: of the replicas; if no number meets the targets, of a request alone or of the given replicas.
    carries: highest certain load over the planned one. distributions_ms: TTFT and TPOT within which 0, 1, ..., 100 % of
    requests are.
    """

    what: ClassVar[str] = "plan"
    made_by: ClassVar[str] = "latfit plan --out plan.json"

    request: str
    rate_per_s: float
    users: int | None
    promise: Verdict
    probability: float | None = None
    binding: str
    replicas: ReplicaCount
    tensor_parallel: Count | None = None
    route: str
    kv_cache: str | None
    carries: float | None = None
    steps_may_be_slower_pct: float | None
    share_of_throughput_used: float | None = None
    distributions_ms: Mapping[str, Sequence[float]] = {}
    effects: Sequence[Effect] = ()
    pareto: Sequence[Trade] = ()
    stalls: Stalls | None = None
    states: OperatingStates | None = None
    fits: Sequence[FitQuality]
    cost: Cost = Cost()
    prefill_apart: ApartPlan | None = None
    schedule: SchedulePlan | None = None
    simulated: Work | None = None
    seed: int = 0
    warnings: Sequence[Message]
    unsupported: Sequence[str] = ()
    notes: Sequence[str]

    @property
    def load(self) -> str:
        return format_rate(self.rate_per_s) if self.users is None else count_text(self.users, "user")

    @property
    def outcome_text(self) -> str:
        return ", ".join(each.outcome for each in self.targets)

    @property
    def fit_error_pct(self) -> float:
        return max((each.worst_pct for each in self.fits), default=0.0)

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded(document)

    def __repr__(self) -> str:
        return f"<ServingPlan: {self.replicas.value} replicas, {self.promise}>"


def probability_of(reached: Sequence[Reached], slower_pct: float | None, fits: Sequence[FitQuality]) -> float | None:
    """Return the least probability of any target, and that steps are no slower than they may.

    The held-out error of the fits counts as the 97.5 % limit of how much slower steps may be.
    """
    error_pct = max((each.worst_pct for each in fits), default=0.0)
    found = [each.probability for each in reached]
    if slower_pct is not None and error_pct > 0:
        found.append(student_tail(math.inf, -Z * slower_pct / error_pct))
    known = [each for each in found if each is not None]
    return min(known) if len(known) == len(found) and known else None
