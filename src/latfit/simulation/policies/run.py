"""Run replications of a policy under a load, until there are as many as requested or the result is precise.

Replication r draws its load from (seed, r) alone, so policies with one seed meet the same requests, and neither other
runs nor the number of threads change a result. The default length follows from the load (`policies.estimate`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from latfit.errors import refuse
from latfit.policies import Policy
from latfit.simulation.policies.estimate import (
    LEAST_BATCHES,
    MOST,
    RECORDED,
    STEADY,
    VARYING,
    Length,
    Summary,
    divided,
    estimate,
    grows,
    length_of,
    longer,
    summarise,
)
from latfit.simulation.policies.replication import FEWEST, check_paths, draw, run
from latfit.simulation.policies.result import SimResult, make_result
from latfit.simulation.policies.service import System
from latfit.simulation.summary import PERCENTILES
from latfit.threads import on_threads
from latfit.workload import ClosedLoad, Load, OpenLoad, Piecewise, RecordedLoad, Streams

MOST_REQUESTS, MOST_REPLICATIONS = 100_000_000, 100_000  # of a replication, and of a run, that can be asked for

Progress = Callable[[float], None]  # called with the share of the work that is done


@dataclass(frozen=True)
class Options:
    """How long to simulate."""

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
        refuse(outside, f"a warm-up of {self.warmup} of the run", "--warmup", "Give a share from 0 to below 1.")
        outside = self.precision is not None and not 0 < self.precision < 1
        refuse(outside, f"a precision of {self.precision}", "--set precision", "Give a share, such as 0.01.")


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
    random = any(path.exponential or path.noise is not None for path in system.paths)
    if isinstance(load, RecordedLoad) and not random:
        # Every replication would be the same.
        options = replace(options, replications=1, precision=None)
    kind, length = kind_of(load), _first_length(load, options)
    below_capacity = not load_rate(load) >= system.capacity(policy)

    def replications(numbers: range, of: int) -> list[Summary]:
        found = []
        with on_threads(threads) as pool:
            for summary in pool.map(lambda r: one_replication(policy, system, load, options, length, r), numbers):
                found.append(summary)
                if progress:
                    progress((numbers.start + len(found)) / of)
        return found

    summaries = replications(range(length.replications), length.replications)
    if options.requests is None and kind == STEADY and below_capacity:
        while (more := longer(summaries, length, options.warmup)) is not None:
            length = more
            summaries = replications(range(length.replications), length.replications)
    if options.precision is not None and below_capacity:
        most = options.most_replications
        if options.requests is None:
            most = min(most, MOST // length.requests)
        while (upto := _replications_needed(summaries, options.precision, most)) > len(summaries):
            summaries += replications(range(len(summaries), upto), most)
    return make_result(
        policy,
        system,
        summaries,
        load_rate(load),
        classes=_class_names(load),
        seed=options.seed,
        free=options.requests is None,
    )


def one_replication(
    policy: Policy, system: System, load: Load, options: Options, length: Length, replication: int
) -> Summary:
    """The summary of replication 0, 1, ... of a length, the same wherever and whenever it is run."""
    streams = Streams(options.seed, replication)
    served = run(policy, system, draw(load, length.requests, length.warm / length.requests, system, streams), streams)
    return summarise(served, length, options.sla_ms, kind_of(load))


def _first_length(load: Load, options: Options) -> Length:
    """Return the requested length, else a first one that `longer` extends."""
    requests, replications, warmup = options.requests, options.replications, options.warmup
    if isinstance(load, RecordedLoad):
        recorded = len(load.requests)
        return length_of(min(requests or recorded, recorded), replications, warmup or 0.0)
    if kind_of(load) == VARYING:  # its course counts from the first request on
        if requests is None:
            requests, replications = divided(0, replications, 0.0).requests, max(replications, LEAST_BATCHES)
        return length_of(requests, replications, warmup or 0.0)
    return divided(0, replications, warmup) if requests is None else length_of(requests, replications, warmup)


def _replications_needed(summaries: list[Summary], precision: float, most: int) -> int:
    """Return the replications to run up to for the precision of p99; as many as there are if no more are needed."""
    count = len(summaries)
    found, _ = estimate(summaries, PERCENTILES["p99"])
    width = found.relative_half_width
    precise = width <= precision and sum(each.counted for each in summaries) >= found.needed
    if count >= most or grows(summaries) or precise:
        return count
    guess = 1.05 * count * (width / precision) ** 2 if math.isfinite(width) else math.inf
    return int(min(most, 2 * count, max(count + 1, math.ceil(min(guess, most)))))


def load_rate(load: Load) -> float:
    """Return arrivals per ms; NaN for a closed loop, whose rate is what the service makes of it."""
    return math.nan if isinstance(load, ClosedLoad) else load.rate


def kind_of(load: Load) -> str:
    """Return STEADY, VARYING or RECORDED."""
    if isinstance(load, RecordedLoad):
        return RECORDED
    return VARYING if isinstance(load, OpenLoad) and isinstance(load.arrivals, Piecewise) else STEADY


def _class_names(load: Load) -> list[str]:
    if isinstance(load, RecordedLoad):
        return [f"class {c}" for c in range(int(load.requests.class_id.max()) + 1)]
    return [each.name or f"class {c}" for c, each in enumerate(load.classes)]
