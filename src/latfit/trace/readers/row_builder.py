"""What readers of engine logs share: rows gathered in packed columns, runs told from counters, and their errors."""

import math
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from latfit.errors import BadInput, WrongUsage
from latfit.stats import FloatArray
from latfit.trace.columns import REQUIRED
from latfit.trace.readers.reader import Options
from latfit.trace.readers.source import Source
from latfit.trace.readers.text import Tally
from latfit.trace.table import Array


class Gathered:
    """Rows while a reader runs. Every row has the same names; a number takes eight bytes."""

    def __init__(self) -> None:
        self._numbers: dict[str, array[float]] = {}
        self._labels: dict[str, list[str]] = {}
        self.rows = 0

    def add(self, numbers: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        for name, value in numbers.items():
            self._numbers.setdefault(name, array("d")).append(value)
        for name, label in (labels or {}).items():
            self._labels.setdefault(name, []).append(label)
        self.rows += 1

    def numbers(self, name: str) -> FloatArray:
        return np.array(self._numbers.get(name, ()), dtype=np.float64)

    def labels(self, name: str) -> list[str]:
        return self._labels.get(name, [])

    def columns(self) -> dict[str, Array]:
        """All of them as arrays, without those that are neither required nor ever known."""
        found: dict[str, Array] = {}
        for name in self._numbers:
            column = self.numbers(name)
            if name in REQUIRED or not np.isnan(column).all():
                found[name] = column
        for name, labels in self._labels.items():
            if any(labels):
                found[name] = np.array(labels, dtype=object)
        return found


def run_names(replicas: Sequence[str], counters: FloatArray) -> list[str]:
    """A name for each row's run: its replica, and how often the replica's counter has started again."""
    last: dict[str, float] = {}
    starts: dict[str, int] = {}
    names = []
    for replica, counter in zip(replicas, counters.tolist(), strict=True):
        if replica not in starts or counter < last[replica]:
            starts[replica] = starts.get(replica, 0) + 1
        if math.isfinite(counter) or replica not in last:
            last[replica] = counter
        names.append(f"{replica}#{starts[replica]}")
    return names


def from_start_of_run(seconds: FloatArray, runs: Sequence[str]) -> FloatArray:
    """Seconds since the first row of the same run."""
    names = {run: i for i, run in enumerate(dict.fromkeys(runs))}
    index = np.fromiter((names[run] for run in runs), np.intp, len(runs))
    first = np.full(len(names), np.inf)
    np.fmin.at(first, index, seconds)
    return np.asarray(seconds - np.where(np.isfinite(first), first, np.nan)[index])


def refuse_table_options(options: Options, source: Source, reader: str) -> None:
    """Raises WrongUsage where a column map or a unit is given for a format that fixes both."""
    given = [name for name, value in (("--map", options.column_map), ("--unit", options.unit)) if value]
    if given:
        raise WrongUsage(
            f"does not apply to {reader} files, whose columns and units are fixed",
            where=f"{given[0]} for {source.name}",
            remedy=f"Leave {given[0]} out, or read the file as a table with --format table.",
        )


def no_steps(source: Source, expected: str, tally: Tally) -> BadInput:
    """The error of a file in which no step was found."""
    unread = tally.bad + tally.cut
    seen = f" ({unread} lines could not be read)" if unread else ""
    return BadInput(f"holds no step{seen}", where=source.name, remedy=f"Expected {expected}.")
