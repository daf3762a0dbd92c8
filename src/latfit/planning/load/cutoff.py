"""T_cut: how long a request may wait for the GPU before it goes to the CPU's queue.

The overflow rate depends on T_cut, so this is a fixed point: which T_cut keep the q-quantile of all responses within
the SLA (`queueing.overflow`), by the exact distribution, by the proved bound, and by the textbook formula, which admits
what the system then misses and refuses what it could do. The answer is the largest T_cut, the most that the GPU may
collect: by proof where that costs less than a tenth of what the exact distribution admits, else by the exact
distribution; with an objective, the T_cut that is best for it among those that meet the SLA.

Exact distribution and proof hold for Poisson arrivals, a GPU whose steps take T(b) and an exponential CPU service. That
is what a path of nominal numbers is taken to be; where steps were measured, or arrivals come in bursts, T_cut is found
by running the two queues with that scatter, and is called simulated: it is the largest that a long run keeps as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.planning import wording
from latfit.planning.load.compare import cutoffs, keeps
from latfit.planning.load.strategies import Both, Target
from latfit.planning.request import Objective
from latfit.planning.result import Cutoff
from latfit.queueing import (
    COARSE,
    FINE,
    OVERLOADED,
    SMALLEST_SHARE,
    CutoffQueue,
    Effort,
    Method,
    Ranges,
    ResponseDistribution,
    cutoff_queue,
    feasible_cutoffs,
    inner_ranges,
    percentile_of,
)

METHODS: Mapping[str, Method] = {"poisson": "poisson", "rigorous": "rigorous", "exact": "exact"}
"""Names in the result, and in `queueing`."""

PROOF_IS_WORTH = 0.9
PROBES = 24
RUN, STEPS = 12, 5
"""T_cut that are tried by simulation, and bisections of every end of a range."""

INSIDE = (1.0, 0.99, 0.98, 0.96, 0.92, 0.85)
"""Shares of the largest T_cut of short runs that a long run is asked about, in this order."""

Laws = Mapping[float, ResponseDistribution]
"""T_cut in ms -> the response there."""


def cutoff_plan(both: Both, rate: float, target: Target, objective: Objective | None = None) -> tuple[Cutoff, Laws]:
    """The T_cut for a rate per ms, and the distributions over T_cut that it was found with. Raises SlaOutOfReach where
    none can be judged."""
    if not both.closed_form:
        return _by_simulation(both, rate, target, objective)
    times, mu = both.gpu.times, both.cpu_rate
    found = {
        name: feasible_cutoffs(rate, times, mu, target.sla_ms, target.q, method) for name, method in METHODS.items()
    }
    laws = {
        cutoff: law
        for cutoff in _probes(target.sla_ms, found["exact"])
        if (law := _law_or_none(both, rate, cutoff, COARSE)) is not None
    }
    safest = _safest(laws, target)
    value, bound, reason = _chosen(found, laws, target, objective, rate)
    shown = safest if value is None else value
    queue = cutoff_queue(rate, shown, times, mu)
    law = laws.get(shown) or both.law(rate, shown)
    late = _gpu_share(queue.gpu_tail, law, target)
    plan = Cutoff(
        value=value,
        bound=bound,
        reason=reason,
        binding=wording.late_requests(both.gpu.label if late >= 0.5 else None, both.cpu.label, law.utilisation),
        percentile=target.percentile,
        bounds_ms=_bounds(queue, law, target.q),
        holds=("rigorous", "exact"),
        ranges={name: list(spans.ranges) for name, spans in found.items()},
        safest_ms=safest,
        overflow_share=queue.overflow_share,
        mean_ms=law.mean_ms,
        cpu_rate_per_s=mu * 1e3,
        service=service_of(both),
    )
    return plan, laws


def _by_simulation(both: Both, rate: float, target: Target, objective: Objective | None) -> tuple[Cutoff, Laws]:
    """T_cut by running the two queues with the scatter that was measured, or arrivals as they were recorded: neither
    the exact distribution nor the proved bounds describe those."""

    @cache
    def law_at(cutoff: float) -> ResponseDistribution | None:
        return _law_or_none(both, rate, cutoff, COARSE)

    def excess(cutoff: float) -> float:
        law = law_at(cutoff)
        return OVERLOADED if law is None else law.tail(target.sla_ms) - (1 - target.q)

    tried = [cutoff for cutoff in cutoffs(both, target.sla_ms, rate) if cutoff < target.sla_ms]
    grid = sorted({*np.linspace(SMALLEST_SHARE * target.sla_ms, target.sla_ms, RUN).tolist(), *tried})
    spans = inner_ranges(excess, grid, STEPS)
    probes = [*grid, *(end for span in spans for end in span)]
    laws = {cutoff: law for cutoff in probes if (law := law_at(cutoff)) is not None}
    safest = _safest(laws, target)
    inside = [cutoff for cutoff in laws if any(low <= cutoff <= high for low, high in spans)]
    value = None
    if inside and objective is not None:
        value = min(inside, key=lambda c: objective.of(laws[c].percentile(target.q), laws[c].mean_ms, rate))
    elif inside:
        value = _kept(both, rate, target, spans)
    reason = wording.cutoff_found(value is not None, "simulated", spans, target.sla_ms, objective is not None)
    shown = safest if value is None else value
    law, share = both.law(rate, shown), both.overflow_share(rate, shown)
    by_gpu = share < 1 - target.q
    plan = Cutoff(
        value=value,
        bound=None if value is None else "simulated",
        reason=reason,
        binding=wording.late_requests(both.gpu.label if by_gpu else None, both.cpu.label, law.utilisation),
        percentile=target.percentile,
        bounds_ms={**_textbook(both, rate, shown, target.q), "simulated": law.percentile(target.q)},
        holds=("simulated",),
        ranges={"poisson": list(_textbook_ranges(both, rate, target)), "simulated": list(spans)},
        safest_ms=safest,
        overflow_share=share,
        mean_ms=law.mean_ms,
        cpu_rate_per_s=both.cpu_rate * 1e3,
        service=service_of(both),
    )
    return plan, laws


def _kept(both: Both, rate: float, target: Target, spans: Sequence[tuple[float, float]]) -> float:
    """The largest T_cut that a long run keeps as well; that of the short runs where none of those tried is kept."""
    low, high = spans[-1]
    for share in INSIDE:
        cutoff = share * high
        if cutoff >= low and keeps(_law_or_none(both, rate, cutoff, FINE), target):
            return cutoff
    return high


def _textbook(both: Both, rate: float, cutoff_ms: float, q: float) -> dict[str, float | None]:
    """The percentile by the formula in circulation, which knows no scatter."""
    try:
        value = cutoff_queue(rate, cutoff_ms, both.gpu.times, both.cpu_rate).textbook_percentile(q)
    except SlaOutOfReach:
        return {}
    return {"poisson": value if math.isfinite(value) else None}


def _textbook_ranges(both: Both, rate: float, target: Target) -> Sequence[tuple[float, float]]:
    """T_cut that the formula in circulation admits."""
    return feasible_cutoffs(rate, both.gpu.times, both.cpu_rate, target.sla_ms, target.q, "poisson").ranges


def _safest(laws: Laws, target: Target) -> float:
    if not laws:
        raise SlaOutOfReach(
            "no T_cut can be judged: the overflow overloads the CPU, or the largest batch binds",
            where="rate",
            remedy="Lower the rate, or measure larger batches.",
        )
    return min(laws, key=lambda cutoff: laws[cutoff].percentile(target.q))


def service_of(both: Both) -> dict[str, Any]:
    """What the CPU's service is taken to be, and how variable it was measured to be."""
    cpu = both.cpu
    if cpu.times.noise is not None:
        cv = float(cpu.times.cv(1)[0])
        return {"assumed": "measured", "cv": cv, "sentence": wording.measured_service(cpu.label, cv)}
    given = cpu.path.nominal
    median = given.slope_ms if given is not None and given.median else None
    return {"assumed": "exponential", "cv": None, "sentence": wording.assumed_service(cpu.label, median)}


def _chosen(
    found: Mapping[str, Ranges],
    laws: Laws,
    target: Target,
    objective: Objective | None,
    rate: float,
) -> tuple[float | None, str | None, str]:
    """(T_cut, what vouches for it, why)."""
    exact, proved = found["exact"], found["rigorous"]
    if exact.largest is None:
        best = min(law.percentile(target.q) for law in laws.values())
        return None, None, wording.no_cutoff(target.sla_ms, target.percentile, best)
    if objective is not None:
        inside = [cutoff for cutoff in laws if cutoff in exact]
        value = min(inside, key=lambda c: objective.of(laws[c].percentile(target.q), laws[c].mean_ms, rate))
        return (
            value,
            "rigorous" if value in proved else "exact",
            wording.cutoff_found(True, "exact", exact.ranges, target.sla_ms, True),
        )
    if proved.largest is not None and proved.largest >= PROOF_IS_WORTH * exact.largest:
        return (
            proved.largest,
            "rigorous",
            wording.cutoff_found(True, "rigorous", exact.ranges, target.sla_ms, False),
        )
    reason = wording.cutoff_found(True, "exact", exact.ranges, target.sla_ms, False, (proved.largest,))
    return exact.largest, "exact", reason


def _probes(sla_ms: float, exact: Ranges) -> list[float]:
    grid = np.linspace(sla_ms / 1000, sla_ms, PROBES).tolist()
    ends = [end for span in exact.ranges for end in span]
    inside = [x for low, high in exact.ranges for x in np.linspace(low, high, 9).tolist()]
    return sorted({*grid, *ends, *inside})


def _law_or_none(both: Both, rate: float, cutoff_ms: float, effort: Effort) -> ResponseDistribution | None:
    try:
        return both.law(rate, cutoff_ms, effort)
    except SlaOutOfReach:
        return None


def _bounds(queue: CutoffQueue, law: ResponseDistribution, q: float) -> dict[str, float | None]:
    """The q-quantile by each method, in ms; None where a method gives none."""
    share, spare = queue.overflow_share, queue.cpu_rate - queue.rate

    def anyone(y: float) -> float:
        """The bound that needs nothing of the batches, lambda < mu."""
        return min(1.0, math.exp(-spare * y) / share) if spare > 0 and share > 0 else 1.0

    ways: Mapping[str, Callable[[], float]] = {
        "poisson": lambda: queue.textbook_percentile(q),
        "poisson_with_gpu": lambda: percentile_of(queue.textbook_tail, q),
        "rigorous": lambda: queue.proved_percentile(q),
        "rigorous_any_batch": lambda: percentile_of(queue.with_cpu(anyone), q),
        "exact": lambda: law.percentile(q),
    }
    found = {name: way() for name, way in ways.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _gpu_share(gpu_tail: Callable[[float], float], law: ResponseDistribution, target: Target) -> float:
    """Share of the late requests that the GPU served, at the SLA or the percentile, whichever is earlier."""
    moment = 0.999 * min(law.percentile(target.q), target.sla_ms)
    return gpu_tail(moment) / max(law.tail(moment), 1e-300)
