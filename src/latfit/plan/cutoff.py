"""T_cut: how long a request may wait for the GPU before it goes to the CPU's queue.

The overflow rate depends on T_cut, so this is a fixed point: which T_cut keep the q-quantile of all responses within
the SLA (`queueing.cutoff_search`), by the exact law, by the proved bound, and by the customary formula, which admits
what the system then misses and refuses what it could do. The answer is the largest T_cut, the most that the GPU may
collect: by proof where that costs less than a tenth of what the exact law admits, else by the exact law; with an
objective, the T_cut that is best for it among those that meet the SLA.

All assume an exponential CPU service with the fitted mean. The fit's own spread says how far that is from the truth: an
exponential service has a coefficient of variation of 1, a 99th percentile of 6.6 medians. A steadier service queues
less, so for it the numbers are cautious on the CPU's side; a simulation with the fitted service has the last word
(`plan/simulated_cutoff.py`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware.estimate import phase_of, spread
from latfit.hardware.profile import ExecutionPath
from latfit.plan.result import Cutoff
from latfit.plan.systems import Both, Target
from latfit.plan.wishes import Objective
from latfit.queueing.cutoff import CutoffQueue, cutoff_queue
from latfit.queueing.cutoff_law import CutoffLaw, exact_law
from latfit.queueing.cutoff_search import SMALLEST_SHARE, Method, Ranges, feasible_cutoffs
from latfit.queueing.law import percentile_of
from latfit.units import format_ms

METHODS: Mapping[str, Method] = {"poisson": "customary", "rigorous": "proved", "exact": "exact"}
"""Names in the result, and in `queueing`."""

PROOF_IS_WORTH = 0.9
STEADY, WILD = 0.5, 1.5
"""Coefficients of variation outside of which an exponential service is a poor description."""

PROBES = 24


def cutoff_plan(both: Both, rate: float, target: Target, objective: Objective | None = None) -> Cutoff:
    """The T_cut for a rate per ms. Raises SlaOutOfReach where none can be judged."""
    times, mu = both.gpu.times, both.cpu_rate
    found = {
        name: feasible_cutoffs(rate, times, mu, target.sla_ms, target.q, method) for name, method in METHODS.items()
    }
    laws = dict(_laws(rate, both, _probes(target.sla_ms, found["exact"])))
    if not laws:
        raise SlaOutOfReach(
            "no T_cut can be judged: the overflow overloads the CPU, or the largest batch binds",
            where="rate",
            remedy="Lower the rate, or measure larger batches.",
        )
    safest = min(laws, key=lambda cutoff: laws[cutoff].percentile(target.q))
    value, bound, reason = _chosen(found, laws, target, objective, rate)
    shown = safest if value is None else value
    queue = cutoff_queue(rate, shown, times, mu)
    law = laws.get(shown) or exact_law(queue)
    return Cutoff(
        value=value,
        bound=bound,
        reason=reason,
        binding=_binding(queue, law, target, both),
        percentile=target.percentile,
        bounds_ms=_bounds(queue, law, target.q),
        holds=("rigorous", "exact"),
        ranges={name: list(spans.ranges) for name, spans in found.items()},
        safest_ms=safest,
        overflow_share=law.overflow_share,
        mean_ms=law.mean_ms,
        amx_rate_per_s=mu * 1e3,
        service=service_check(both.cpu.path, target.tokens),
    )


def percentiles_at(both: Both, rate: float, cutoff_ms: float, q: float) -> dict[str, float | None]:
    """The q-quantile of all responses by each method, in ms; empty where none can tell."""
    try:
        queue = cutoff_queue(rate, cutoff_ms, both.gpu.times, both.cpu_rate)
        return _bounds(queue, exact_law(queue), q)
    except SlaOutOfReach:
        return {}


def service_check(cpu: ExecutionPath, tokens: int) -> dict[str, Any]:
    """What is assumed of the CPU's service, and how the fit's spread compares."""
    found = spread(cpu, phase_of(tokens))
    exponential = {"assumed": "exponential", "cv_assumed": 1.0, "cv": None if math.isnan(found.cv) else found.cv}
    if cpu.quote is not None:
        said = f"{cpu.label}: quoted, so its spread is unknown; taken as exponential"
        if cpu.quote.median:
            median = cpu.quote.slope_ms
            said += (
                f", which with a median of {format_ms(median)} serves {math.log(2) / median * 1e3:,.4g}/s, not"
                f" {1e3 / median:,.4g}/s"
            )
        return {**exponential, "plausible": None, "sentence": f"{said}."}
    if not found.known:
        sentence = f"{cpu.label}: taken as exponential; the fit has no intervals to check that with."
        return {**exponential, "plausible": None, "sentence": sentence}
    plausible = STEADY <= found.cv <= WILD
    verdict = "near" if plausible else "far from"
    then = "" if plausible else "; --check simulates the fitted service"
    sentence = (
        f"{cpu.label}: service taken as exponential (coefficient of variation 1); the fit's is {found.cv:.2g},"
        f" {verdict} that{then}."
    )
    return {**exponential, "plausible": plausible, "sentence": sentence}


def _chosen(
    found: Mapping[str, Ranges],
    laws: Mapping[float, CutoffLaw],
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


def _laws(rate: float, both: Both, cutoffs: Iterable[float]) -> Iterable[tuple[float, CutoffLaw]]:
    for cutoff in cutoffs:
        try:
            yield cutoff, exact_law(cutoff_queue(rate, cutoff, both.gpu.times, both.cpu_rate))
        except SlaOutOfReach:
            continue


def _bounds(queue: CutoffQueue, law: CutoffLaw, q: float) -> dict[str, float | None]:
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


def _binding(queue: CutoffQueue, law: CutoffLaw, target: Target, both: Both) -> str:
    """Which of the two sides holds most of the late requests, at the SLA or the percentile, whichever is later."""
    moment = 0.999 * min(law.percentile(target.q), target.sla_ms)
    gpu, everyone = queue.gpu_tail(moment), law.tail(moment)
    if gpu >= 0.5 * everyone:
        return f"requests that {both.gpu.label} serves: they wait up to T_cut, then for their batch"
    return f"the queue of {both.cpu.label}: overflow keeps it {queue.overflow_rate / queue.amx_rate:.0%} busy"
