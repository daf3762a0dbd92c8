"""What a change of step times means for a load: replicas, price, SLO, and where the change comes from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from latfit import reporting
from latfit.api.fits import Fit
from latfit.api.request import shared
from latfit.api.requests import CompareRequest, EnginePlanRequest
from latfit.api.serving import EnginePlan, plan_engine
from latfit.fitting import read_columns_of
from latfit.model import FitResult, latency_draws, parameter_draws, with_typical_context
from latfit.planning import Reached
from latfit.records import Number, Record
from latfit.stats import FloatArray
from latfit.units import count_text, format_ms, number

TAILS_PCT = (2.5, 97.5)


class StepChange(Record, frozen=True, kw_only=True):
    """Change of a typical step at the load, with the 95 % interval of the fits' parameters (None if unknown).

    fixed_ms: change at `smallest_batch`, the smallest that both measured.  growing_ms: the rest, which grows with B, S.
    """

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
    """The plan of a load with a source's steps, compared with the baseline's. replicas: None if none meet the SLO.

    as_before: the targets with this source's steps on the baseline's replicas and settings.  price_per_hour: of all
    replicas.
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
        """Whether the load needs more replicas, because the baseline's miss a target beyond its interval."""
        more = self.replicas is None or self.replicas > (self.baseline_replicas or self.replicas)
        return more and any(not each.met and each.certain for each in self.as_before)

    def sentences(self, baseline: str) -> list[str]:
        """What the change means, and where it comes from."""
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

    def table(self) -> "reporting.Table":
        """Return where the change of step times comes from."""
        rows = [
            (
                each.step,
                f"{each.B:,}",
                f"{each.S:,}",
                format_ms(each.before_ms),
                _signed(each.change_ms),
                "-" if each.interval_ms is None else " to ".join(map(_signed, each.interval_ms)),
                _signed(each.fixed_ms),
                _signed(each.growing_ms),
            )
            for each in self.changes
        ]
        smallest = f"at B = {self.changes[0].smallest_batch:,}"
        columns = ("step", "B", "S", "before", "change", "95 % interval", smallest, "beyond it")
        return reporting.Table(f"Steps at this load, {self.source}", columns, rows, words=("step",))


def _signed(value_ms: float) -> str:
    return f"{'-' if value_ms < 0 else '+'}{format_ms(abs(value_ms))}"


def compare_plans(request: CompareRequest, names: Sequence[str], fits: Sequence[Fit]) -> list[Upgrade]:
    """Plan the load of a request with each fit, the baseline first, and compare. Raises WrongUsage, BadInput."""
    plans = [_plan(request, fit) for fit in fits]
    (first, *others), (first_fit, *other_fits) = plans, fits
    found = []
    for name, plan, fit in zip(names[1:], others, other_fits, strict=True):
        as_before: Sequence[Reached] = ()
        if first.feasible and first.replicas is not None:
            settings = {key: value for key, value in first.engine.items() if value is not None}
            as_before = _plan(request, fit, replicas=first.replicas, engine=settings).result.targets
        found.append(
            Upgrade(
                source=name,
                load=first.result.load,
                baseline_replicas=first.replicas,
                replicas=plan.replicas,
                as_before=as_before,
                baseline_price_per_hour=first.result.cost.price_per_hour,
                price_per_hour=plan.result.cost.price_per_hour,
                changes=_step_changes(first, first_fit.result, fit.result),
            )
        )
    return found


def _plan(request: CompareRequest, fit: Fit, **more: Any) -> EnginePlan:
    return plan_engine.of(shared(EnginePlanRequest, request, fit=fit, force=True, **more))


def _step_changes(plan: EnginePlan, first: FitResult, other: FitResult) -> list[StepChange]:
    """Compare typical steps at the batch that the baseline's plan runs: decode, and with a prompt chunk."""
    summary, engine = plan.result.outcome, plan.result.engine
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
    ends = np.percentile(change[1:], TAILS_PCT, axis=0) if len(change) > 1 else None
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
    """Return typical latencies in ms (1 + draws, n) of steps (n, 2): of the fit, then of its parameter draws."""
    columns = with_typical_context({"B": sizes[:, 0], "S": sizes[:, 1]}, fit.typical and (typical or fit.typical))
    read = {name: columns[name] for name in dict.fromkeys(["B", "S", *read_columns_of(fit)]) if name in columns}
    draws = parameter_draws(fit, seed=seed)
    own = np.asarray(fit.latency_ms(**read))[None, :]
    return own if draws is None else np.vstack([own, latency_draws(fit, draws, **read)])
