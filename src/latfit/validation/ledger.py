"""A ledger of promises: percentiles as planned, and as measured in runs of the same load, over weeks and hosts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from latfit.errors import BadInput
from latfit.files import dumps, rewrite
from latfit.planning import percentile_interval, share_interval
from latfit.records import Number, Record
from latfit.stats import FloatArray

SAME_LOAD = 0.05
"""Relative difference of two rates, beside two standard errors of the run's, up to which their loads are the same."""


class PromisedFigure(Record, frozen=True, kw_only=True):
    """A percentile of a run as planned (None if nothing was) and as measured, in ms, with 95 % intervals.

    An end that is not a number is open.
    """

    name: str
    limit_ms: float
    planned_ms: float | None = None
    planned_interval_ms: tuple[Number, Number] | None = None
    measured_ms: float
    interval_ms: tuple[Number, Number]

    @property
    def kept(self) -> bool:
        return self.measured_ms <= self.limit_ms

    @property
    def as_planned(self) -> bool:
        """Whether the measured time is surely no longer than planned."""
        return self.planned_interval_ms is None or not self.interval_ms[0] > self.planned_interval_ms[1]

    @property
    def error_pct(self) -> float | None:
        """Measured above planned."""
        return 100 * (self.measured_ms / self.planned_ms - 1) if self.planned_ms else None

    @property
    def covered(self) -> bool | None:
        """Whether planned and measured agree at 95 %: their distance is within both intervals' half widths, in squares.

        None without a planned interval.
        """
        if not self.planned_ms or self.planned_interval_ms is None:
            return None
        (a, b), (c, d) = self.planned_interval_ms, self.interval_ms
        if self.measured_ms >= self.planned_ms:
            widths = (_log(b, self.planned_ms), _log(self.measured_ms, c))
        else:
            widths = (_log(self.planned_ms, a), _log(d, self.measured_ms))
        return abs(_log(self.measured_ms, self.planned_ms)) <= math.hypot(*widths)


def _log(one: float, two: float) -> float:
    """Log ratio; infinite for an open end."""
    return math.log(one / two) if 0 < one < math.inf and two > 0 else math.inf


def compare_percentile(
    name: str,
    percentile: float,
    times: FloatArray,
    limit_ms: float,
    planned: tuple[float, tuple[float, float] | None] | None,
) -> PromisedFigure | None:
    """Return a percentile of measured times (n,) in the order of arrival, compared with the planned one.

    planned: value and interval, in ms. None without a finite time.
    """
    known, share = times[np.isfinite(times)], percentile / 100
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
    """One run compared with its plan.

    Attributes
    ----------
    added
        When, in UTC.
    subject
        Model and machine.
    planned_per_s, measured_per_s
        Rates of requests.
    """

    added: str
    subject: str
    plan: str
    run: str
    planned_per_s: float
    measured_per_s: float
    requests: int
    figures: Sequence[PromisedFigure]

    @property
    def measurement(self) -> tuple[str, list[float]]:
        """What identifies a run: its name and times."""
        return self.run, [each.measured_ms for each in self.figures]

    @property
    def comparable(self) -> bool:
        """Whether the run had the planned load."""
        slack = SAME_LOAD + 2 / math.sqrt(max(self.requests, 1))
        return abs(self.measured_per_s / self.planned_per_s - 1) <= slack


class Ledger(Record, frozen=True, tag_field="schema", tag="latfit.ledger/1"):
    """All entries, in the order in which they were added."""

    what: ClassVar[str] = "ledger"
    made_by: ClassVar[str] = "latfit ledger add"

    entries: Sequence[LedgerEntry] = ()

    @property
    def counted(self) -> list[LedgerEntry]:
        """Entries whose run had the planned load."""
        return [each for each in self.entries if each.comparable]

    @property
    def figures(self) -> list[PromisedFigure]:
        return [figure for entry in self.counted for figure in entry.figures]

    @property
    def kept(self) -> tuple[int, int]:
        """How many promised limits were kept, of how many."""
        return sum(each.kept for each in self.figures), len(self.figures)

    @property
    def coverage_pct(self) -> tuple[float, tuple[float, float]] | None:
        """Share of figures within their stated intervals, with its own 95 % interval; None without such figures.

        Figures of one run are correlated: the interval counts runs.
        """
        found = [[each.covered for each in entry.figures if each.covered is not None] for entry in self.counted]
        runs = [each for each in found if each]
        if not runs:
            return None
        share = sum(sum(each) for each in runs) / sum(len(each) for each in runs)
        low, high = share_interval(share, len(runs))
        return 100 * share, (100 * low, 100 * high)


def read_ledger(source: Path) -> Ledger:
    """Return the ledger in a file; an empty one where there is none. Raises BadInput."""
    return Ledger.read(source) if source.exists() else Ledger()


def add_entry(target: Path, entry: LedgerEntry) -> Ledger:
    """Add an entry to the ledger in a file. Raises BadInput for a run that it holds already, TargetNotWritable."""
    found = Ledger()

    def content() -> str:
        nonlocal found
        before = read_ledger(target)
        if any(each.measurement == entry.measurement for each in before.entries):
            raise BadInput(f"{entry.run} is in the ledger", where=str(target), remedy="Add each run once.")
        found = Ledger([*before.entries, entry])
        return dumps(found.to_json())

    rewrite(target, content)
    return found
