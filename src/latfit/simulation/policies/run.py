"""Run replications of a policy under a load, until there are as many as requested or the result is precise.

Replication r draws its load from (seed, r) alone, so policies with one seed meet the same requests, and neither other
runs nor the number of threads change a result. The default length follows from the load (`policies.estimate`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from latfit.errors import WrongUsage
from latfit.policies import Policy
from latfit.simulation.policies.estimate import (
    LEAST_BATCHES,
    MOST,
    PERCENTILES,
    RECORDED,
    STEADY,
    VARYING,
    Length,
    Summary,
    divided,
    error_parts,
    grows,
    interval,
    length_of,
    longer,
    paired,
    statistics,
    summarise,
    wanted,
)
from latfit.simulation.policies.replication import FEWEST, check_paths, draw, run
from latfit.simulation.policies.result import Asked, SimResult, make_result
from latfit.simulation.policies.service import System
from latfit.simulation.summary import Interval
from latfit.threads import on_threads
from latfit.workload import ClosedLoad, Load, OpenLoad, Piecewise, RecordedLoad, Streams

MOST_REQUESTS, MOST_REPLICATIONS = 100_000_000, 100_000
"""Of a replication, and of a run, that can be asked for."""

Progress = Callable[[float], None]
"""Called with the share of the work that is done."""


@dataclass(frozen=True)
class Options:
    """requests: in each replication; None for as many as the load needs.  warmup: share of them left out at the start;
    None for as many as the start counts.  sla_ms: what attainment is counted against where classes have no deadlines.
    precision: stop once the interval of `statistic` is within this share of its value, after `replications` at least
    and `most_replications` at most.  level: of the intervals."""

    requests: int | None = None
    warmup: float | None = None
    replications: int = 5
    seed: int = 0
    sla_ms: float = math.inf
    precision: float | None = None
    statistic: str = "p99"
    most_replications: int = 200
    level: float = 0.95
    percentiles: tuple[float, ...] = PERCENTILES

    def __post_init__(self) -> None:
        few, most = "--set precision=0.01 sets the accuracy.", f"{MOST_REQUESTS:,}"
        known = statistics(self.percentiles)
        for wrong, found, where, remedy in (
            (self.requests is not None and self.requests < FEWEST, f"{self.requests} requests", "--requests",
             f"Give {FEWEST} or more in each replication."),
            ((self.requests or 0) > MOST_REQUESTS, f"{self.requests or 0:,} requests", "--requests",
             f"Give {most} at most; {few}"),
            (not 1 <= self.replications <= MOST_REPLICATIONS, f"{self.replications:,} replications", "--replications",
             f"Give 1 to {MOST_REPLICATIONS:,}; {few}"),
            (not 0 <= (self.warmup or 0) < 1, f"a warm-up of {self.warmup} of the run", "--warmup",
             "Give a share from 0 to below 1."),
            (self.precision is not None and not 0 < self.precision < 1, f"a precision of {self.precision}",
             "--set precision", "Give a share, such as 0.01."),
            (not 0 < self.level < 1, f"a level of {self.level:g}", "--level", "Give a share, such as 0.95."),
            (not all(0 < p < 1 for p in self.percentiles), "a percentile is not between 0 and 100 %", "--percentile",
             "Give one that is."),
            (self.statistic not in known, f"{self.statistic!r} is not known", "statistic",
             f"Take one of {', '.join(known)}."),
        ):  # fmt: skip
            if wrong:
                raise WrongUsage(found, where=where, remedy=remedy)


def simulate(
    policy: Policy,
    system: System,
    load: Load,
    options: Options = Options(),
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> SimResult:
    """Run the policy. threads: of replications; they change nothing but the time it takes.

    Raises WrongUsage for a policy without the path it needs, BadInput for a load that cannot be served.
    An unstable system is no error: every replication is finite, and the result says `stable=False` and why.
    """
    check_paths(policy, system)
    if isinstance(load, RecordedLoad) and not _random(system):
        # Every replication would be the same.
        options = replace(options, replications=1, precision=None)
    work = _Work(policy, system, load, options, threads, progress)
    length = work.first_length()
    summaries = work.replications(length)
    while options.requests is None and work.kind == STEADY and work.below_capacity:
        more = longer(summaries, length, options.warmup)
        if more is None:
            break
        length = more
        summaries = work.replications(length)
    if options.precision is not None and work.below_capacity:
        summaries = work.until_precise(summaries, length)
    asked = Asked(load_rate(load), _class_names(load), options.level, options.seed, work.kind, options.requests is None)
    return make_result(policy, system, summaries, asked)


def one_replication(
    policy: Policy, system: System, load: Load, options: Options, length: Length, replication: int
) -> Summary:
    """The summary of replication 0, 1, ... of a length, the same wherever and whenever it is run."""
    streams = Streams(options.seed, replication)
    served = run(policy, system, draw(load, length.requests, length.warm / length.requests, system, streams), streams)
    return summarise(served, length, options.sla_ms, options.percentiles, kind_of(load))


@dataclass(frozen=True)
class _Work:
    """One call of `simulate`."""

    policy: Policy
    system: System
    load: Load
    options: Options
    threads: int
    progress: Progress | None

    @property
    def kind(self) -> str:
        return kind_of(self.load)

    @property
    def below_capacity(self) -> bool:
        """As far as capacities tell."""
        return not load_rate(self.load) >= self.system.capacity(self.policy)

    def first_length(self) -> Length:
        """Return the requested length, else a first one that `longer` extends."""
        options, warmup = self.options, self.options.warmup
        if isinstance(self.load, RecordedLoad):
            known = len(self.load.requests)
            return length_of(min(options.requests or known, known), options.replications, warmup or 0.0)
        if self.kind == VARYING:  # its course counts from the first request on
            replications = options.replications if options.requests else max(options.replications, LEAST_BATCHES)
            each = options.requests or divided(wanted(options.percentiles, 0.0), options.replications, 0.0).requests
            return length_of(each, replications, warmup or 0.0)
        if options.requests is None:
            return divided(wanted(options.percentiles, 0.0), options.replications, warmup)
        return length_of(options.requests, options.replications, warmup)

    def replications(self, length: Length) -> list[Summary]:
        return self._in_order(length, range(length.replications), length.replications)

    def until_precise(self, summaries: list[Summary], length: Length) -> list[Summary]:
        """More replications until the interval is as narrow as asked, or there are as many as allowed."""
        options = self.options
        assert options.precision is not None
        most = options.most_replications
        if options.requests is None:
            most = min(most, MOST // length.requests)
        while len(summaries) < most and not grows(summaries):
            count, found = len(summaries), interval(summaries, options.statistic, options.level)
            width = found.relative_half_width
            if width <= options.precision and sum(each.counted for each in summaries) >= found.needed:
                break
            guess = 1.05 * count * (width / options.precision) ** 2 if math.isfinite(width) else math.inf
            upto = int(min(most, 2 * count, max(count + 1, math.ceil(min(guess, most)))))
            summaries += self._in_order(length, range(count, upto), most)
        return summaries

    def _in_order(self, length: Length, numbers: range, of: int) -> list[Summary]:
        """Run the replications of these numbers, a part of `of`."""
        found: list[Summary] = []

        def one(number: int) -> Summary:
            return one_replication(self.policy, self.system, self.load, self.options, length, number)

        def note(summary: Summary) -> None:
            found.append(summary)
            if self.progress:
                self.progress((numbers.start + len(found)) / of)

        if min(self.threads, len(numbers)) < 2:
            for number in numbers:
                note(one(number))
            return found
        with on_threads(self.threads) as pool:
            for summary in pool.map(one, numbers):
                note(summary)
        return found


def compared(first: SimResult, other: SimResult) -> Mapping[str, Interval]:
    """other - first in ms, by statistic, from results with one seed and the same options."""
    level = first.level
    return {
        name: paired(error_parts(first.summaries, name, level), error_parts(other.summaries, name, level), level)
        for name in first.latency
    }


def load_rate(load: Load) -> float:
    """Arrivals per ms; NaN for a closed loop, whose rate is what the service makes of it."""
    return math.nan if isinstance(load, ClosedLoad) else load.rate


def kind_of(load: Load) -> str:
    """STEADY, VARYING or RECORDED."""
    if isinstance(load, RecordedLoad):
        return RECORDED
    return VARYING if isinstance(load, OpenLoad) and isinstance(load.arrivals, Piecewise) else STEADY


def _random(system: System) -> bool:
    return any(path.exponential or path.noise is not None for path in system.paths)


def _class_names(load: Load) -> list[str]:
    if isinstance(load, RecordedLoad):
        return [f"class {c}" for c in range(int(load.requests.class_id.max()) + 1)]
    classes = load.classes if isinstance(load, OpenLoad | ClosedLoad) else ()
    return [each.name or f"class {c}" for c, each in enumerate(classes)]
