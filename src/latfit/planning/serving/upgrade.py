"""What a change of step times means for a load, and where the change comes from."""

from collections.abc import Mapping, Sequence

import numpy as np

from latfit.hardware import CERTAIN
from latfit.model import FitResult, step_draws, with_typical_context
from latfit.planning.serving.result import Reached, ServingPlan
from latfit.records import Number, Record
from latfit.stats import FloatArray
from latfit.units import count_text, number


class StepChange(Record, frozen=True, kw_only=True):
    """Change of a typical step at the load. fixed_ms: at `smallest_batch`; growing_ms: the rest."""

    step: str
    B: int
    S: int
    before_ms: Number
    change_ms: Number
    interval_ms: tuple[Number, Number] | None
    smallest_batch: int
    fixed_ms: Number
    growing_ms: Number


class Upgrade(Record, frozen=True, kw_only=True):
    """The plan of a load with a source's steps, compared with the baseline's.

    as_before: the targets with this source's steps on the baseline's replicas and settings.
    """

    source: str
    load: str
    baseline_replicas: int | None
    replicas: int | None
    as_before: Sequence[Reached] = ()
    baseline_price_per_hour: float | None = None
    price_per_hour: float | None = None
    changes: Sequence[StepChange] = ()

    @property
    def worse(self) -> bool:
        more = self.replicas is None or self.replicas > (self.baseline_replicas or self.replicas)
        return more and any(not each.met and each.certain for each in self.as_before)

    def sentences(self, baseline: str) -> list[str]:
        if self.baseline_replicas is None:
            return [f"No number of replicas meets the SLO at {self.load} with {baseline}."]
        needs = "meets the SLO with no number of replicas"
        if self.replicas is not None:
            needs = f"needs {count_text(self.replicas, 'replica')}"
        price = ""
        if self.price_per_hour is not None and self.baseline_price_per_hour is not None:
            price = f" (price per hour {number(self.price_per_hour)} and {number(self.baseline_price_per_hour)})"
        found = [f"At {self.load} {self.source} {needs}, {baseline} {self.baseline_replicas:,}{price}."]
        if self.as_before:
            met = all(each.met for each in self.as_before)
            outcome = ", ".join(each.outcome for each in self.as_before)
            found.append(f"As planned for {baseline} it {'meets' if met else 'misses'} the SLO: {outcome}.")
        return found


def compare_steps(plan: ServingPlan, first: FitResult, other: FitResult) -> list[StepChange]:
    """Compare typical steps at the batch of the baseline's plan: decode, and with a prompt chunk."""
    summary, engine = plan.outcome, plan.engine
    if summary is None or engine is None:
        return []
    low = max(int(fit.domain["B"][0]) for fit in (first, other))
    high = min(int(fit.domain["B"][1]) for fit in (first, other))
    if low > high:
        return []
    B = int(np.clip(round(summary.batch_size["p50"]), low, high))
    chunk = min(engine.max_num_batched_tokens or 0, *(int(fit.domain["S"][1]) for fit in (first, other)))
    steps = [("decode", B, B)]
    if first.knows_prefill and other.knows_prefill and chunk > B:
        steps.append(("with prefill", B, chunk))
    sizes = np.array([[low, low], *([b, s] for _, b, s in steps)], dtype=np.float64)
    # Draws of both fits come from the same random numbers: another order makes them independent.
    before, after = (_latencies(fit, sizes, first.typical, seed) for seed, fit in enumerate((first, other)))
    change = after - before  # (1 + draws, 1 + steps): the fits themselves first, the smallest step first
    ends = np.quantile(change[1:], CERTAIN, axis=0) if len(change) > 1 else None
    return [
        StepChange(
            step=step,
            B=b,
            S=s,
            before_ms=float(before[0, i]),
            change_ms=float(change[0, i]),
            interval_ms=None if ends is None else (float(ends[0, i]), float(ends[1, i])),
            smallest_batch=low,
            fixed_ms=float(change[0, 0]),
            growing_ms=float(change[0, i] - change[0, 0]),
        )
        for i, (step, b, s) in enumerate(steps, start=1)
    ]


def _latencies(fit: FitResult, sizes: FloatArray, typical: Mapping[str, float], seed: int) -> FloatArray:
    """Return typical latencies in ms (1 + draws, n) of steps (n, 2): of the fit, then of its draws."""
    columns = with_typical_context({"B": sizes[:, 0], "S": sizes[:, 1]}, fit.typical and (typical or fit.typical))
    own, drawn = fit.latency_ms(**columns), step_draws(fit, columns, seed=seed)
    return own[None, :] if drawn is None else np.vstack([own, drawn])
