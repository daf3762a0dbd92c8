"""Trace: a table of steps with its origin, and which phase a step is in: as the trace says, else as its columns imply.

Columns are NumPy arrays of one length; the table is never changed in place.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.trace.columns import BY_NAME, IDENTITY
from latfit.units import number

Array = NDArray[Any]
Coded = tuple[Array, list[str]]


@dataclass(frozen=True, repr=False)
class Trace:
    """Steps by column (each (n,)), and the provenance they were stored with.

    Columns of `schema.COLUMNS` have their declared meaning; any other column is a label that the source brought along.
    codes: {column of labels: (number of each row's label (n,), the labels)} where that is known; see `coded`.
    """

    columns: Mapping[str, Array]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    codes: dict[str, Coded] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __repr__(self) -> str:
        spans = [
            f"{name} {number(float(self.floats(name).min()))} to {number(float(self.floats(name).max()))}"
            for name in ("B", "S", "T_ms")
            if name in self and len(self)
        ]
        return f"Trace of {', '.join([f'{len(self):,} steps', *spans])}"

    def to_pandas(self) -> Any:
        """The steps as a pandas DataFrame, a column each."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns))

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def floats(self, name: str) -> NDArray[np.float64]:
        """Column as float64 (n,)."""
        return np.asarray(self.columns[name], dtype=np.float64)

    def coded(self, name: str) -> Coded:
        """(number of each row's value (n,), the values by number) as texts: looked for once, kept for selected rows."""
        if name not in self.codes:
            values = self[name].tolist()
            if set(map(type, values)) != {str}:  # such as lists, which are no labels but may stand in a table
                values = list(map(str, values))
            known = {value: i for i, value in enumerate(dict.fromkeys(values))}
            self.codes[name] = np.fromiter(map(known.__getitem__, values), np.int32, len(values)), list(known)
        return self.codes[name]

    def select(self, rows: Array) -> "Trace":
        """The rows of a boolean mask or an index array, in that order."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        codes = {name: (code[rows], values) for name, (code, values) in self.codes.items()}
        return Trace({name: column[rows] for name, column in self.columns.items()}, self.provenance, codes)

    def only(self, names: Sequence[str]) -> "Trace":
        """Of its columns those with these names."""
        codes = {name: coded for name, coded in self.codes.items() if name in names}
        return Trace({name: self[name] for name in names if name in self}, self.provenance, codes)

    def with_columns(self, **columns: Array) -> "Trace":
        codes = {name: coded for name, coded in self.codes.items() if name not in columns}
        return Trace({**self.columns, **columns}, self.provenance, codes)

    def with_provenance(self, **facts: Any) -> "Trace":
        return Trace(self.columns, {**self.provenance, **facts}, self.codes)

    def systems(self) -> Iterator[tuple[dict[str, str], "Trace"]]:
        """The trace split by the identity columns that vary: ({column: value}, rows), in order of first appearance."""
        varying = self.identity()
        if not varying:
            yield {}, self
            return
        number = self.system_numbers()
        order = np.argsort(number, kind="stable")
        ends = np.cumsum(np.bincount(number))
        ordered = self.select(order)
        for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
            rows = ordered.part(begin, end)
            yield {name: str(rows[name][0]) for name in varying}, rows

    def part(self, begin: int, end: int) -> "Trace":
        """The rows from `begin` to `end`, which are not copied."""
        # labels of a few rows are sooner looked for again than those of all rows kept with them
        codes = {
            name: (code[begin:end], values) for name, (code, values) in self.codes.items() if len(values) <= end - begin
        }
        return Trace({name: column[begin:end] for name, column in self.columns.items()}, self.provenance, codes)

    def system_numbers(self) -> NDArray[np.intp]:
        """Which system each row belongs to (n,): 0, 1, ... in order of first appearance."""
        key = np.zeros(len(self), dtype=np.intp)
        for name in self.identity():
            values, place = self._distinct(name)
            key = np.unique(key * len(values) + place, return_inverse=True)[1].ravel()
        first = np.full(int(key.max(initial=-1)) + 1, len(key), dtype=np.intp)
        np.minimum.at(first, key, np.arange(len(key)))
        rank = np.empty(len(first), dtype=np.intp)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[key]

    def labels(self) -> dict[str, Array]:
        """Columns that have no meaning of their own here: what the source brought along."""
        return {name: self[name] for name in self.columns if name not in BY_NAME and name not in IDENTITY}

    def identity(self) -> list[str]:
        """The identity columns that vary."""
        return [name for name in IDENTITY if name in self and len(self._distinct(name)[0]) > 1]

    def _distinct(self, name: str) -> tuple[Sequence[Any], Array]:
        """The different values of a column, and which of them each row has (n,). What is not a number is one value."""
        if self[name].dtype == object:
            code, values = self.coded(name)
            there = np.unique(code)  # of selected rows, not every value is there
            return [values[i] for i in there], np.searchsorted(there, code)
        distinct, place = np.unique(self[name], return_inverse=True)
        return distinct.tolist(), place.ravel()


def concatenated(parts: Sequence[Trace], names: Sequence[str]) -> Trace:
    """One trace from several, in order. A column that a part lacks is NaN, empty or false there.

    Runs that are called the same in two parts are different runs, unless the parts are files of one recording, which
    know their run (provenance key `run`); they get their part's name in front.
    """
    if len(parts) == 1:
        return parts[0]
    columns = {}
    for column in dict.fromkeys(name for part in parts for name in part.columns):
        kinds = [part[column].dtype for part in parts if column in part]
        columns[column] = np.concatenate([_column_or_missing(part, column, kinds[0]) for part in parts])
    runs = [_runs(part) for part in parts]
    seen = Counter(run for part in runs for run in set(part))
    told_apart = [
        [
            run if run and (seen[run] == 1 or "run" in part.provenance) else f"{name}: {run}".rstrip(": ")
            for run in labels
        ]
        for part, labels, name in zip(parts, runs, names, strict=True)
    ]
    columns["run"] = np.array([run for labels in told_apart for run in labels], dtype=object)
    origin = {name: dict(part.provenance) for part, name in zip(parts, names, strict=True)}
    return Trace(columns, {"parts": origin})


def _runs(part: Trace) -> list[str]:
    return [str(run) for run in part["run"].tolist()] if "run" in part else [""] * len(part)


def _column_or_missing(part: Trace, column: str, kind: np.dtype[Any]) -> Array:
    if column in part:
        return part[column]
    if kind.kind == "b":
        return np.zeros(len(part), dtype=bool)
    return np.full(len(part), "", dtype=object) if kind.kind == "O" else np.full(len(part), np.nan)


DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"
UNKNOWN = "prefill or mixed"
"""A step with more tokens than requests, where nothing says whether some of them decode."""


def phases(trace: Trace) -> NDArray[np.object_]:
    """DECODE, PREFILL, MIXED or UNKNOWN for each row (n,); other names that a source uses are kept."""
    if "phase" in trace:
        return np.array([str(phase) for phase in trace["phase"].tolist()], dtype=object)
    B, S = trace.floats("B"), trace.floats("S")
    if "prefill_tokens" in trace:
        prefill = trace.floats("prefill_tokens")
        return np.where(prefill == 0, DECODE, np.where(prefill >= S, PREFILL, MIXED)).astype(object)
    return np.where(S == B, DECODE, UNKNOWN).astype(object)
