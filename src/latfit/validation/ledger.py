"""A ledger of plans: percentiles as planned and as measured, over weeks and hosts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from latfit.errors import BadInput
from latfit.files import dumps, rewrite
from latfit.planning import ServingPlan, percentile_interval, share_interval
from latfit.provenance import utc_now
from latfit.records import Number, Record
from latfit.stats import FloatArray
from latfit.validation.compare import metrics
from latfit.validation.measured import as_measured
from latfit.workload import Recording

MAX_LOAD_DIFFERENCE = 0.05  # of rate and of output tokens; 2/sqrt(n), the error of a measured mean, comes on top


class PromisedFigure(Record, frozen=True, kw_only=True):
    """A percentile of a run as planned (None if nothing was) and as measured, ms; infinite if unlimited."""

    name: str
    limit_ms: float
    planned_ms: float | None = None
    planned_interval_ms: tuple[Number, Number] | None = None
    measured_ms: Number
    interval_ms: tuple[Number, Number]

    @property
    def kept(self) -> bool:
        return self.measured_ms <= self.limit_ms

    @property
    def as_planned(self) -> bool:
        """False only if the measured interval lies entirely above the planned one."""
        return self.planned_interval_ms is None or not self.interval_ms[0] > self.planned_interval_ms[1]

    @property
    def error_pct(self) -> float | None:
        if not self.planned_ms or not math.isfinite(self.measured_ms):
            return None
        return 100 * (self.measured_ms / self.planned_ms - 1)

    @property
    def covered(self) -> bool | None:
        """Whether |ln(measured / planned)| is within the joint half width of both intervals; None if an end is open."""
        if not self.planned_ms or self.planned_interval_ms is None:
            return None
        (a, b), (c, d), measured = self.planned_interval_ms, self.interval_ms, self.measured_ms
        if not all(map(math.isfinite, (a, b, c, d, measured))) or not measured > 0:
            return None
        up = measured >= self.planned_ms
        ratios = (b / self.planned_ms, measured / c if c > 0 else math.inf)
        if not up:
            ratios = (self.planned_ms / a if a > 0 else math.inf, d / measured)
        return abs(math.log(measured / self.planned_ms)) <= math.hypot(*map(math.log, ratios))


def compare_percentile(
    name: str,
    percentile: float,
    times: FloatArray,
    limit_ms: float,
    planned: tuple[float, tuple[float, float] | None] | None,
) -> PromisedFigure | None:
    """Compare a percentile of times (n,), in order of arrival, with the planned value and interval in ms.

    times: infinite without an answer, NaN if a request has no such time. None if no request has one.
    """
    known, share = times[~np.isnan(times)], percentile / 100
    if not len(known):
        return None
    value, ends = planned or (None, None)
    return PromisedFigure(
        name=name,
        limit_ms=limit_ms,
        planned_ms=value,
        planned_interval_ms=ends,
        measured_ms=float(np.quantile(known, share, method="inverted_cdf")),
        interval_ms=percentile_interval(known, share),
    )


class LedgerEntry(Record, frozen=True, kw_only=True):
    """One run of a model and machine (subject) compared with its plan. Failed requests exceed any limit."""

    added: str
    subject: str
    plan: str
    run: str
    planned_per_s: float
    measured_per_s: float
    planned_output_tokens: float | None = None
    measured_output_tokens: float | None = None
    requests: int
    failed: int = 0
    figures: Sequence[PromisedFigure]

    @property
    def measurement(self) -> tuple[str, list[float]]:
        return self.run, [each.measured_ms for each in self.figures]

    @property
    def comparable(self) -> bool:
        slack = MAX_LOAD_DIFFERENCE + 2 / math.sqrt(max(self.requests, 1))
        pairs = [(self.measured_per_s, self.planned_per_s)]
        if self.measured_output_tokens and self.planned_output_tokens:
            pairs.append((self.measured_output_tokens, self.planned_output_tokens))
        return all(abs(measured / planned - 1) <= slack for measured, planned in pairs)


class Ledger(Record, frozen=True, tag_field="schema", tag="latfit.ledger/1"):
    what: ClassVar[str] = "ledger"
    made_by: ClassVar[str] = "latfit ledger add"

    entries: Sequence[LedgerEntry] = ()

    @property
    def counted(self) -> list[LedgerEntry]:
        return [each for each in self.entries if each.comparable]

    @property
    def figures(self) -> list[PromisedFigure]:
        return [figure for entry in self.counted for figure in entry.figures]

    @property
    def kept(self) -> tuple[int, int]:
        return sum(each.kept for each in self.figures), len(self.figures)

    @property
    def coverage_pct(self) -> tuple[float, tuple[float, float]] | None:
        """Share of testable figures whose intervals cover what was measured, with its interval over runs."""
        found = [[each.covered for each in entry.figures if each.covered is not None] for entry in self.counted]
        runs = [each for each in found if each]
        if not runs:
            return None
        share = sum(sum(each) for each in runs) / sum(len(each) for each in runs)
        low, high = share_interval(share, len(runs))
        return 100 * share, (100 * low, 100 * high)


def read_ledger(source: Path) -> Ledger:
    """Return the ledger in a file, empty if missing. Raises BadInput."""
    return Ledger.read(source) if source.exists() else Ledger()


def add_entry(target: Path, entry: LedgerEntry) -> Ledger:
    """Add an entry to the ledger in a file. Raises BadInput for a run that it holds, TargetNotWritable."""
    found = Ledger()

    def content() -> str:
        nonlocal found
        before = read_ledger(target)
        if any(each.measurement == entry.measurement for each in before.entries):
            raise BadInput(f"{entry.run} is already in the ledger", where=str(target), remedy="Add each run once.")
        found = Ledger([*before.entries, entry])
        return dumps(found.to_json())

    rewrite(target, content)
    return found


def compare_with_plan(plan: ServingPlan, recorded: Recording, source: str) -> LedgerEntry:
    """Compare recorded requests with their plan, a file. Raises BadInput."""
    promised = [each for each in plan.targets if each.percentile is not None and each.unit == "ms"]
    if not plan.feasible or plan.unsupported or not promised:
        remedy = "Plan with --ttft, --tpot or --e2e; `latfit plan` says what is missing."
        raise BadInput("the plan promises nothing", where=source, remedy=remedy)
    run, requests, arrivals = as_measured(recorded), len(recorded.requests), recorded.requests.arrival_ms
    span_s = float(arrivals[-1] - arrivals[0]) / 1e3
    if not span_s > 0:
        raise BadInput("its requests have no rate", where=run.source, remedy="Give two or more, at different times.")
    failed = requests - len(run)
    times = {
        name: np.append(values, np.full(failed, math.inf))
        for name, values in metrics(run, run.first_ms, run.last_ms).items()
    }
    figures = []
    for each in promised:
        measured, planned = times[f"{each.metric}_ms"], (each.value, each.interval)
        figures.append(compare_percentile(each.name, each.percentile or 0.0, measured, each.limit, planned))
    tokens = None
    if plan.outcome is not None and plan.outcome.throughput_per_s > 0:
        tokens = plan.outcome.output_tokens_per_s / plan.outcome.throughput_per_s
    return LedgerEntry(
        added=utc_now(),
        subject=", ".join(dict.fromkeys(each.name for each in plan.fits)),
        plan=source,
        run=run.source,
        planned_per_s=plan.rate_per_s,
        measured_per_s=(requests - 1) / span_s,
        planned_output_tokens=tokens,
        measured_output_tokens=float(np.mean(run.requests.output_tokens)),
        requests=requests,
        failed=failed,
        figures=[each for each in figures if each is not None],
    )
