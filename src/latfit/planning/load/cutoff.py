"""T_cut: how long a request may wait for the GPU before it goes to the CPU's queue.

The overflow rate depends on T_cut, so this is a fixed point: which T_cut keep the q-quantile of all responses within
the SLA (`queueing.overflow`), by the exact law, by the proved bound, and by the customary formula, which admits
what the system then misses and refuses what it could do. The answer is the largest T_cut, the most that the GPU may
collect: by proof where that costs less than a tenth of what the exact law admits, else by the exact law; with an
objective, the T_cut that is best for it among those that meet the SLA.

Exact law and proof hold for Poisson arrivals, a GPU whose steps take T(b) and an exponential CPU service. That is what
a path of nominal numbers is taken to be; where steps were measured, or arrivals come in bursts, T_cut is found by
running the two queues with that scatter, and is called simulated.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.planning.load.strategies import Both, Target
from latfit.planning.request import Objective
from latfit.planning.result import Cutoff
from latfit.queueing import (
    COARSE,
    OVERLOADED,
    SMALLEST_SHARE,
    CutoffQueue,
    Effort,
    Method,
    Ranges,
    ResponseLaw,
    cutoff_queue,
    feasible_cutoffs,
    inner_ranges,
    percentile_of,
)
from latfit.units import format_ms

METHODS: Mapping[str, Method] = {"poisson": "customary", "rigorous": "proved", "exact": "exact"}
"""Names in the result, and in `queueing`."""

PROOF_IS_WORTH = 0.9
PROBES = 24
RUN, STEPS = 12, 5
"""T_cut that are tried by simulation, and bisections of every end of a range."""


def cutoff_plan(both: Both, rate: float, target: Target, objective: Objective | None = None) -> Cutoff:
    """The T_cut for a rate per ms. Raises SlaOutOfReach where none can be judged."""
    if not both.closed_form:
        return _by_simulation(both, rate, target, objective)
    times, mu = both.gpu.times, both.cpu_rate
    found = {
        name: feasible_cutoffs(rate, times, mu, target.sla_ms, target.q, method) for name, method in METHODS.items()
    }
    laws = dict(_laws(rate, both, _probes(target.sla_ms, found["exact"])))
    safest = _safest(laws, target)
    value, bound, reason = _chosen(found, laws, target, objective, rate)
    shown = safest if value is None else value
    queue = cutoff_queue(rate, shown, times, mu)
    law = laws.get(shown) or both.law(rate, shown)
    late = _gpu_share(queue.gpu_tail, law, target)
    return Cutoff(
        value=value,
        bound=bound,
        reason=reason,
        binding=_binding(late >= 0.5, law, both),
        percentile=target.percentile,
        bounds_ms=_bounds(queue, law, target.q),
        holds=("rigorous", "exact"),
        ranges={name: list(spans.ranges) for name, spans in found.items()},
        safest_ms=safest,
        overflow_share=queue.overflow_share,
        mean_ms=law.mean_ms,
        amx_rate_per_s=mu * 1e3,
        service=service_of(both),
    )


def _by_simulation(both: Both, rate: float, target: Target, objective: Objective | None) -> Cutoff:
    """T_cut by running the two queues with the scatter that was measured, or arrivals as they were recorded: neither
    the exact law nor the proved bounds describe those."""

    def excess(cutoff: float) -> float:
        law = _law_or_none(both, rate, cutoff, COARSE)
        return OVERLOADED if law is None else law.tail(target.sla_ms) - (1 - target.q)

    grid = np.linspace(SMALLEST_SHARE * target.sla_ms, target.sla_ms, RUN).tolist()
    spans = inner_ranges(excess, grid, STEPS)
    laws = dict(_laws(rate, both, [*grid, *(end for span in spans for end in span)]))
    safest = _safest(laws, target)
    value, reason = None, f"no T_cut meets {format_ms(target.sla_ms)}"
    inside = [cutoff for cutoff in laws if any(low <= cutoff <= high for low, high in spans)]
    if inside:
        value = max(inside)
        if objective is not None:
            value = min(inside, key=lambda c: objective.of(laws[c].percentile(target.q), laws[c].mean_ms, rate))
        meet = "meets" if len(spans) == 1 else "meet"
        how = "best for the objective" if objective is not None else "the largest"
        reason = f"{how} in a simulation with the measured scatter; {spans_text(spans, target.sla_ms)} {meet} the SLA"
    shown = safest if value is None else value
    law, share = both.law(rate, shown), both.overflow_share(rate, shown)
    return Cutoff(
        value=value,
        bound=None if value is None else "simulated",
        reason=reason,
        binding=_binding(share < 1 - target.q, law, both),
        percentile=target.percentile,
        bounds_ms={**_textbook(both, rate, shown, target.q), "simulated": law.percentile(target.q)},
        holds=("simulated",),
        ranges={"poisson": list(_textbook_ranges(both, rate, target)), "simulated": list(spans)},
        safest_ms=safest,
        overflow_share=share,
        mean_ms=law.mean_ms,
        amx_rate_per_s=both.cpu_rate * 1e3,
        service=service_of(both),
    )


def _textbook(both: Both, rate: float, cutoff_ms: float, q: float) -> dict[str, float | None]:
    """The percentile by the formula in circulation, which knows no scatter."""
    try:
        value = cutoff_queue(rate, cutoff_ms, both.gpu.times, both.cpu_rate).customary_percentile(q)
    except SlaOutOfReach:
        return {}
    return {"poisson": value if math.isfinite(value) else None}


def _textbook_ranges(both: Both, rate: float, target: Target) -> Sequence[tuple[float, float]]:
    """T_cut that the formula in circulation admits."""
    return feasible_cutoffs(rate, both.gpu.times, both.cpu_rate, target.sla_ms, target.q, "customary").ranges


def _safest(laws: Mapping[float, ResponseLaw], target: Target) -> float:
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
    if cpu.times.scatter is not None:
        cv = cpu.times.scatter.of(1).cv
        sentence = f"{cpu.label}: one request at a time, its service as measured (coefficient of variation {cv:.2g})."
        return {"assumed": "measured", "cv": cv, "sentence": sentence}
    said = f"{cpu.label}: nobody measured how its service scatters; taken as exponential"
    if cpu.path.quote is not None and cpu.path.quote.median:
        median = cpu.path.quote.slope_ms
        said += (
            f", which with a median of {format_ms(median)} serves {math.log(2) / median * 1e3:,.4g}/s, not"
            f" {1e3 / median:,.4g}/s"
        )
    return {"assumed": "exponential", "cv": None, "sentence": f"{said}."}


def _chosen(
    found: Mapping[str, Ranges],
    laws: Mapping[float, ResponseLaw],
    target: Target,
    objective: Objective | None,
    rate: float,
) -> tuple[float | None, str | None, str]:
    """(T_cut, what vouches for it, why)."""
    exact, proved = found["exact"], found["rigorous"]
    if exact.largest is None:
        best = min(law.percentile(target.q) for law in laws.values())
        reason = f"no T_cut meets {format_ms(target.sla_ms)}: the {target.percentile:g}th percentile is at least"
        return None, None, f"{reason} {format_ms(best)}"
    spans = spans_text(exact.ranges, target.sla_ms)
    meet = "meets" if len(exact.ranges) == 1 else "meet"
    if objective is not None:
        inside = [cutoff for cutoff in laws if cutoff in exact]
        value = min(inside, key=lambda c: objective.of(laws[c].percentile(target.q), laws[c].mean_ms, rate))
        return value, "rigorous" if value in proved else "exact", f"best for the objective; {spans} {meet} the SLA"
    if proved.largest is not None and proved.largest >= PROOF_IS_WORTH * exact.largest:
        return proved.largest, "rigorous", f"the largest that is proved; by the exact law {spans} {meet} the SLA"
    certain = "none by proof" if proved.largest is None else f"by proof only up to {format_ms(proved.largest)}"
    return exact.largest, "exact", f"the largest by the exact law; {spans} {meet} the SLA, {certain}"


def spans_text(spans: Sequence[tuple[float, float]], sla_ms: float) -> str:
    """Ranges of T_cut in words; one that starts where the search does has no lower end."""
    start = 1.001 * SMALLEST_SHARE * sla_ms
    said = [f"{format_ms(a)} to {format_ms(b)}" if a > start else f"up to {format_ms(b)}" for a, b in spans]
    return ", ".join(said) or "none"


def _probes(sla_ms: float, exact: Ranges) -> list[float]:
    grid = np.linspace(sla_ms / 1000, sla_ms, PROBES).tolist()
    ends = [end for span in exact.ranges for end in span]
    inside = [x for low, high in exact.ranges for x in np.linspace(low, high, 9).tolist()]
    return sorted({*grid, *ends, *inside})


def _laws(rate: float, both: Both, cutoffs: Iterable[float]) -> Iterable[tuple[float, ResponseLaw]]:
    for cutoff in cutoffs:
        law = _law_or_none(both, rate, cutoff, COARSE)
        if law is not None:
            yield cutoff, law


def _law_or_none(both: Both, rate: float, cutoff_ms: float, effort: Effort) -> ResponseLaw | None:
    try:
        return both.law(rate, cutoff_ms, effort)
    except SlaOutOfReach:
        return None


def _bounds(queue: CutoffQueue, law: ResponseLaw, q: float) -> dict[str, float | None]:
    """The q-quantile by each method, in ms; None where a method gives none."""
    share, spare = queue.overflow_share, queue.amx_rate - queue.rate

    def anyone(y: float) -> float:
        """The bound that needs nothing of the batches, lambda < mu."""
        return min(1.0, math.exp(-spare * y) / share) if spare > 0 and share > 0 else 1.0

    ways: Mapping[str, Callable[[], float]] = {
        "poisson": lambda: queue.customary_percentile(q),
        "poisson_with_gpu": lambda: percentile_of(queue.customary_tail, q),
        "rigorous": lambda: queue.proved_percentile(q),
        "rigorous_any_batch": lambda: percentile_of(queue.with_amx(anyone), q),
        "exact": lambda: law.percentile(q),
    }
    found = {name: way() for name, way in ways.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _gpu_share(gpu_tail: Callable[[float], float], law: ResponseLaw, target: Target) -> float:
    """Share of the late requests that the GPU served, at the SLA or the percentile, whichever is earlier."""
    moment = 0.999 * min(law.percentile(target.q), target.sla_ms)
    return gpu_tail(moment) / max(law.tail(moment), 1e-300)


def _binding(by_gpu: bool, law: ResponseLaw, both: Both) -> str:
    """Which of the two sides holds most of the late requests."""
    if by_gpu:
        return f"requests that {both.gpu.label} serves: they wait up to T_cut, then for their batch"
    return f"the queue of {both.cpu.label}: overflow keeps it {law.utilisation:.0%} busy"
