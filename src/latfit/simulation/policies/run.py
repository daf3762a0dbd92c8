"""Run replications of a policy under a load, and sweeps over policies, rates and settings.

Replication r draws its load from (seed, r) alone, so policies with one seed meet the same requests.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from latfit.errors import SlaOutOfReach, refuse
from latfit.policies import POLICIES, SPECIAL, Policy, Settings, Solve, named_policy
from latfit.simulation.points import MOST_POINTS, Progress, Running, digest, simulate_points
from latfit.simulation.policies import estimate as estimates
from latfit.simulation.policies.estimate import RECORDED, STEADY, VARYING, Length, Summary
from latfit.simulation.policies.replication import FEWEST, check_paths, draw, run
from latfit.simulation.policies.result import Difference, SimResult, make_result, p99_difference
from latfit.simulation.policies.service import System, path_times
from latfit.simulation.summary import PERCENTILES
from latfit.threads import on_threads
from latfit.workload import ClosedLoad, Load, OpenLoad, Piecewise, RecordedLoad, Streams

MOST_REQUESTS, MOST_REPLICATIONS = 100_000_000, 100_000  # of a replication, and of a run, that can be asked for


@dataclass(frozen=True)
class Options:
    requests: int | None = None  # in each replication; None for as many as the load needs
    warmup: float | None = None  # share of them left out at the start; None for as many as the start counts
    replications: int = 5
    seed: int = 0
    sla_ms: float = math.inf  # limit that attainment is counted against if classes have no deadlines
    # Stop once the interval of p99 is within this share of its value, after `replications` at least and
    # `most_replications` at most
    precision: float | None = None
    most_replications: int = 200

    def __post_init__(self) -> None:
        few, requests = "--set precision=0.01 sets the accuracy.", FEWEST if self.requests is None else self.requests
        most, count = f"{FEWEST} to {MOST_REQUESTS:,} in each replication; {few}", self.replications
        outside = not FEWEST <= requests <= MOST_REQUESTS
        refuse(outside, f"{requests:,} requests", "--requests", f"Give {most}")
        outside = not 1 <= count <= MOST_REPLICATIONS
        refuse(outside, f"{count:,} replications", "--replications", f"Give 1 to {MOST_REPLICATIONS:,}; {few}")
        outside = not 0 <= (self.warmup or 0) < 1
        refuse(outside, f"a warm-up of {self.warmup} of the run", "--set warmup", "Give a share from 0 to below 1.")
        outside = self.precision is not None and not 0 < self.precision < 1
        refuse(outside, f"a precision of {self.precision}", "--set precision", "Give a share, such as 0.01.")


def simulate(
    policy: Policy,
    system: System,
    load: Load,
    options: Options = Options(),
    *,
    threads: int = 1,
    progress: Callable[[float], None] | None = None,
) -> SimResult:
    """Run the policy. progress: called with the share of the work that is done.

    Raises WrongUsage for a policy without the path it needs, BadInput for a load that cannot be served. An unstable
    system is no error: the result says `stable=False` and why.
    """
    check_paths(policy, system)
    random = any(path.exponential or path.noise is not None for path in system.paths)
    if isinstance(load, RecordedLoad) and not random:
        # Every replication would be the same.
        options = replace(options, replications=1, precision=None)
    length = _first_length(load, options)
    below_capacity = not load.rate >= system.capacity(policy)

    def replications(numbers: range, of: int) -> list[Summary]:
        found = []
        with on_threads(threads) as pool:
            for summary in pool.map(lambda r: one_replication(policy, system, load, options, length, r), numbers):
                found.append(summary)
                if progress:
                    progress((numbers.start + len(found)) / of)
        return found

    summaries = replications(range(length.replications), length.replications)
    if options.requests is None and kind_of(load) == STEADY and below_capacity:
        while (more := estimates.longer(summaries, length, options.warmup)) is not None:
            length = more
            summaries = replications(range(length.replications), length.replications)
    if options.precision is not None and below_capacity:
        most = options.most_replications
        if options.requests is None:
            most = min(most, estimates.MOST // length.requests)
        while (upto := _replications_needed(summaries, options.precision, most)) > len(summaries):
            summaries += replications(range(len(summaries), upto), most)
    names, free = _class_names(load), options.requests is None
    return make_result(policy, system, summaries, load.rate, classes=names, seed=options.seed, free=free)


def one_replication(
    policy: Policy, system: System, load: Load, options: Options, length: Length, replication: int
) -> Summary:
    streams = Streams(options.seed, replication)
    served = run(policy, system, draw(load, length.requests, length.warm / length.requests, system, streams), streams)
    return estimates.summarise(served, length, options.sla_ms, kind_of(load))


def _first_length(load: Load, options: Options) -> Length:
    requests, replications, kind = options.requests, options.replications, kind_of(load)
    if isinstance(load, RecordedLoad):
        requests = min(requests or len(load.requests), len(load.requests))
    elif kind == VARYING and requests is None:
        requests = estimates.divided(0, replications, 0.0).requests
        replications = max(replications, estimates.LEAST_BATCHES)
    if requests is None:
        return estimates.divided(0, replications, options.warmup)
    # The course of a load that is not steady counts from the first request on.
    return estimates.length_of(requests, replications, options.warmup if kind == STEADY else options.warmup or 0.0)


def _replications_needed(summaries: list[Summary], precision: float, most: int) -> int:
    count = len(summaries)
    found, _ = estimates.estimate(summaries, PERCENTILES["p99"])
    width = found.relative_half_width
    precise = width <= precision and sum(each.counted for each in summaries) >= found.needed
    if count >= most or estimates.grows(summaries) or precise:
        return count
    guess = 1.05 * count * (width / precision) ** 2 if math.isfinite(width) else math.inf
    return int(min(most, 2 * count, max(count + 1, math.ceil(min(guess, most)))))


def kind_of(load: Load) -> str:
    if isinstance(load, RecordedLoad):
        return RECORDED
    return VARYING if isinstance(load, OpenLoad) and isinstance(load.arrivals, Piecewise) else STEADY


def _class_names(load: Load) -> list[str]:
    if isinstance(load, RecordedLoad):
        return [f"class {c}" for c in range(int(load.requests.class_id.max()) + 1)]
    return [each.name or f"class {c}" for c, each in enumerate(load.classes)]


@dataclass(frozen=True, eq=False)
class Point:
    """One simulation of a sweep, see `SweepPoint`."""

    policy: Policy
    system: System
    load: Load
    options: Options
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return digest((self.policy, self.system, self.load, self.options))

    def run(self, threads: int, begun: Callable[[float], None] | None) -> SimResult:
        found = simulate(self.policy, self.system, self.load, self.options, threads=threads, progress=begun)
        return structs.replace(found, summaries=())

    def restored(self, document: Any) -> SimResult:
        return SimResult.from_json(document)


def sweep(
    points: Sequence[Point],
    running: Running = Running(),
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[SimResult]:
    """Return the results; each but the first at its rate has the difference of its p99 to the first."""
    found: list[SimResult] = []
    first: dict[float, SimResult] = {}
    for result in simulate_points(points, running, out=out, resume=resume, progress=progress):
        base = result if math.isnan(result.rate_per_s) else first.setdefault(result.rate_per_s, result)
        gap = None if base is result else p99_difference(base, result)
        if gap is not None:
            result = structs.replace(result, vs_baseline=Difference(base.policy, gap.value, (gap.low, gap.high)))
        found.append(result)
    return found


def points_of(
    policies: Sequence[str],
    system: System,
    load: Load,
    options: Options = Options(),
    *,
    rates: Sequence[float] = (),
    varied: Mapping[str, Sequence[Any]] | None = None,
    settings: Settings = Settings(),
    solve: Solve | None = None,
    skipped: list[SlaOutOfReach],  # takes the errors of points without a policy, as the optimal one above capacity
) -> list[Point]:
    """Return points in the order of the rates (per ms), then the policies, then the settings. Raises WrongUsage."""
    refuse(not policies, "no policy", "--policy", "Give at least one.")
    closed = isinstance(load, ClosedLoad)
    refuse(closed and bool(rates), "a closed loop has no rate to set", "--rate", "Vary --users instead.")
    found: list[Point] = []
    for rate, name in itertools.product(rates or (math.nan,), policies):
        offered = load if math.isnan(rate) or isinstance(load, ClosedLoad) else load.at_rate(rate)
        expected = offered.rate
        if isinstance(offered, ClosedLoad):  # what users send if nobody waits
            expected = offered.users / (offered.think_ms + float(system.main.typical_ms[1]))
        settable = POLICIES[name].settings if name in POLICIES else ()
        own = {key: values for key, values in (varied or {}).items() if key not in SPECIAL or key in settable}
        for values in itertools.product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            try:
                policy = named_policy(name, expected, path_times(system), replace(settings, **chosen), solve)
            except SlaOutOfReach as error:
                skipped.append(error)
                continue
            found.append(Point(policy, system, offered, options, chosen))
            many = len(found) > MOST_POINTS
            refuse(many, f"more than {MOST_POINTS:,} points", "--sweep", "Give fewer values of each setting.")
    return found
