"""T_cut: how long a request may wait for the GPU before it may go to the CPU. Theory: docs/theory/planning.md.

T_cut is enumerated on a grid, each simulated under the dispatch rule on the same random numbers; the answer is the
largest that a long run still confirms, or with an objective the best for it. A proved bound is shown beside it.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.planning import wording
from latfit.planning.load.strategies import Machine, Part, Target, cutoff_strategy
from latfit.planning.request import Objective
from latfit.planning.result import Cutoff
from latfit.queueing import COARSE, QUICK, USUAL, Effort, ResponseDistribution, cutoff_bound, feasible_ranges
from latfit.units import format_ms, format_percent, format_rate

GRID = 12
PRECISION = 5e-3  # of the ends of a range of T_cut
SLA_SHARES = (0.1, 0.3)
NEAR_LARGEST = (1.0, 0.97, 0.92)
COLLECTED_SIGMA = 2.5  # of the requests that arrive within T_cut, for the batch that must end in time
BACKOFF = (1.0, 0.99, 0.98, 0.96, 0.92, 0.85)  # of the largest T_cut of short runs, until a long run confirms

Laws = Mapping[float, ResponseDistribution]


def plan_cutoff(
    machine: Machine, rate: float, target: Target, objective: Objective | None = None
) -> tuple[Cutoff, Laws]:
    """Return the T_cut for a rate per ms, and the distributions by T_cut. Raises SlaOutOfReach if all are unstable."""
    gpu, cpu = machine.parts

    @cache
    def law_at(cutoff: float, effort: Effort = QUICK) -> ResponseDistribution | None:
        return machine.simulate(cutoff_strategy(machine, cutoff), rate, effort)

    grid = {*np.linspace(wording.SMALLEST_SHARE * target.sla_ms, target.sla_ms, GRID).tolist()}
    grid |= {cutoff for cutoff in likely_cutoffs(machine, rate, target) if cutoff < target.sla_ms}
    laws = {cutoff: law for cutoff in sorted(grid) if (law := law_at(cutoff)) is not None}
    if not laws:
        raise SlaOutOfReach("GPU and CPU together are overloaded", where="rate", remedy="Lower the rate.")
    ranges = feasible_ranges(
        np.array(sorted(grid)),
        lambda cutoff: target.is_met(law_at(cutoff)),
        lambda cutoff: target.is_met(law_at(cutoff, COARSE)),
        precision=PRECISION,
    )
    value = None
    if ranges and objective is not None:
        inside = [cutoff for cutoff in laws if any(low <= cutoff <= high for low, high in ranges)]
        value = min(inside, key=lambda c: objective.of(laws[c].percentile(target.q), laws[c].mean_ms, rate))
    elif ranges:
        low, high = ranges[-1]
        tried = [share * high for share in BACKOFF if share * high >= low]
        value = next((cutoff for cutoff in tried if is_surely_met(law_at(cutoff, USUAL), target)), None)
        value = value or next((cutoff for cutoff in tried if target.is_met(law_at(cutoff, COARSE))), None)
        ranges = ranges[:-1] + ([] if value is None else [(low, max(value, low))])
    safest = min(laws, key=lambda cutoff: laws[cutoff].percentile(target.q))
    law = law_at(safest if value is None else value, USUAL)
    assert law is not None
    reason = f"no T_cut meets {format_ms(target.sla_ms)}"
    if value is not None:
        best = "the largest" if objective is None else "best for the objective"
        spans = f"{wording.spans_text(ranges, target.sla_ms)} {'meets' if len(ranges) == 1 else 'meet'}"
        reason = f"{best} in a simulation with the measured noise; {spans} the SLA"
    late = f"the queue of {cpu.label}: overflow keeps it {format_percent(100 * law.utilisation)} busy"
    if law.overflow_share < 1 - target.q or law.utilisation < 0.5:
        late = f"requests that {gpu.label} serves: they wait up to T_cut, then for their batch"
    bounds = bounds_ms(machine, rate, safest if value is None else value, target.q, law)
    plan = Cutoff(
        value=value,
        bound=None if value is None else "simulated",
        reason=reason,
        binding=late,
        percentile=target.percentile,
        bounds_ms=bounds,
        holds=tuple(bounds),
        ranges={"simulated": ranges},
        safest_ms=safest,
        overflow_share=law.overflow_share,
        mean_ms=law.mean_ms,
        cpu_rate_per_s=1e3 / cpu.mean_ms,
        service=describe_service(cpu),
    )
    return plan, laws


def likely_cutoffs(machine: Machine, rate: float, target: Target) -> Iterator[float]:
    """Yield T_cut to try: near the largest that leaves time for the next batch, then shares of the SLA."""
    gpu = machine.main
    spare = target.sla_ms - gpu.mean_ms
    if spare > 0:
        collected = int(rate * spare + COLLECTED_SIGMA * math.sqrt(rate * spare)) + 1
        largest = target.sla_ms - gpu.times(min(collected, gpu.times.max_batch))
        yield from (near * largest for near in NEAR_LARGEST if largest > 0)
    yield from (share * target.sla_ms for share in SLA_SHARES)


def is_surely_met(law: ResponseDistribution | None, target: Target) -> bool:
    """Whether the upper end of the simulation's interval is within the SLA."""
    return law is not None and law.percentile_interval(target.q)[1] <= target.sla_ms * (1 + 1e-6)


def bounds_ms(
    machine: Machine, rate: float, cutoff_ms: float, q: float, law: ResponseDistribution
) -> dict[str, float | None]:
    """Return the percentile at a T_cut by method: simulated, and proved bound where it holds."""
    gpu, cpu = machine.parts
    found: dict[str, float | None] = {"simulated": law.percentile(q)}
    if gpu.times.noise is None and cpu.times.noise is None and machine.arrivals.poisson:
        bound = cutoff_bound(rate, cutoff_ms, gpu.times, 1 / cpu.mean_ms)
        found |= {} if bound is None else {"rigorous": bound.percentile(q)}
    return found


def describe_service(cpu: Part) -> dict[str, Any]:
    """Return what the CPU's service is taken to be."""
    if cpu.times.noise is not None:
        cv = float(cpu.times.cv(1)[0])
        sentence = f"{cpu.label}: one request at a time, its service as measured (coefficient of variation {cv:.2g})."
        return {"assumed": "measured", "cv": cv, "sentence": sentence}
    sentence, given = f"{cpu.label}: its service times were not measured; taken as exponential", cpu.path.nominal
    if given is not None and given.median:
        mean, wrong = format_rate(math.log(2) / given.slope_ms * 1e3), format_rate(1e3 / given.slope_ms)
        sentence += f", which with a median of {format_ms(given.slope_ms)} serves {mean}, not {wrong}"
    return {"assumed": "exponential", "cv": None, "sentence": f"{sentence}."}
