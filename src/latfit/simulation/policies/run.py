"""`simulate` runs replications of a policy against a load, until there are as many as asked or the result is precise;
`check` does so for one percentile and an SLA.

Replication r draws its load from (seed, r) alone, whatever the policy: results of several policies with one seed are on
common random numbers, and nothing depends on what else is run beside it, nor on the number of threads. How long the
replications are, where nobody asked, follows from the load (`latfit.simulation.policies.estimate`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
from latfit.workload import ClosedLoad, Load, OpenLoad, Piecewise, Poisson, RecordedLoad, Streams

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
        if (self.requests is not None and self.requests < FEWEST) or self.replications < 1:
            each = "" if self.requests is None else f"{self.requests} requests in "
            raise WrongUsage(
                f"{each}{self.replications} replications",
                where="--requests",
                remedy=f"Give {FEWEST} requests or more, in one replication or more.",
            )
        for asked, most, option in (
            (self.requests or 0, MOST_REQUESTS, "--requests"),
            (self.replications, MOST_REPLICATIONS, "--replications"),
        ):
            if asked > most:
                raise WrongUsage(
                    f"{asked:,} {option[2:]}",
                    where=option,
                    remedy=f"Give {most:,} at most; --precision says how sure results shall be.",
                )
        if self.warmup is not None and not 0 <= self.warmup < 1:
            raise WrongUsage(
                f"a warm-up of {self.warmup:g} of the run",
                where="--warmup",
                remedy="Give a share from 0 to below 1.",
            )
        if self.precision is not None and not 0 < self.precision < 1:
            raise WrongUsage(
                f"a precision of {self.precision:g}", where="--precision", remedy="Give a share, such as 0.01."
            )
        if not 0 < self.level < 1:
            raise WrongUsage(f"a level of {self.level:g}", where="--level", remedy="Give a share, such as 0.95.")
        if not all(0 < p < 1 for p in self.percentiles):
            raise WrongUsage(
                "a percentile is not between 0 and 100 %", where="--percentile", remedy="Give one that is."
            )
        if self.statistic not in statistics(self.percentiles):
            known = ", ".join(statistics(self.percentiles))
            raise WrongUsage(f"{self.statistic!r} is not known", where="statistic", remedy=f"Take one of {known}.")


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


PRECISION = 0.01


@dataclass(frozen=True, eq=False)
class Checked:
    """percentile: simulated, in ms.  holds: True where its whole interval lies within the SLA, the interval is to be
    trusted and the system stable; False where the whole interval lies beyond or the system is unstable; None where the
    runs cannot tell, or no SLA was given."""

    percentile: Interval
    level: float
    sla_ms: float | None
    holds: bool | None
    result: SimResult

    def to_json(self) -> dict[str, Any]:
        low, high = self.percentile.low, self.percentile.high
        return {
            "percentile_ms": self.percentile.value,
            "ci": [low, high],
            "level": self.level,
            "sla_ms": self.sla_ms,
            "holds": self.holds,
            "stable": self.result.stable,
            "requests": self.result.requests,
            "seed": self.result.seed,
            "notes": list(self.result.notes),
        }


def check(
    policy: Policy,
    system: System,
    load: Load | float,
    percentile: float = 99.0,
    sla_ms: float | None = None,
    options: Options = Options(precision=PRECISION, most_replications=40),
) -> Checked:
    """Simulate until the percentile (in percent) is known within `options.precision`.

    load: any, or a rate per ms for Poisson arrivals. Raises WrongUsage for a policy without the path it needs.
    """
    if 0 < percentile < 1:
        meant = f"{100 * percentile:g}"
        raise WrongUsage(
            f"{percentile:g} % of them, next to none", where="--percentile", remedy=f"Was --percentile {meant} meant?"
        )
    if not 0 < percentile < 100:
        raise WrongUsage(
            f"{percentile:g} is not a percentile", where="--percentile", remedy="Give one above 0, below 100."
        )
    offered = OpenLoad(Poisson(load)) if isinstance(load, float | int) else load
    share = round(percentile / 100, 12)
    (_, name) = statistics((share,))
    percentiles = tuple(sorted({*options.percentiles, share}))
    asked = replace(options, statistic=name, percentiles=percentiles, sla_ms=sla_ms or math.inf)
    result = simulate(policy, system, offered, asked)
    found = result.latency[name]
    return Checked(found, options.level, sla_ms, _verdict(found, sla_ms, result.stable), result)


def _verdict(found: Interval, sla_ms: float | None, stable: bool) -> bool | None:
    if sla_ms is None:
        return None
    if not stable or found.low > sla_ms:
        return False
    return True if found.trusted and found.high <= sla_ms else None
