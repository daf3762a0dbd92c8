"""Trace: a table of steps with its provenance, its columns (docs/formats.md), the phase of each step, and row filters.

Filters such as `hardware == 'h100' and tp in (4, 8)` are a subset of Python, parsed, never executed.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.stats import FloatArray, distinct
from latfit.units import number

SCHEMA = "latfit.trace/1"
MAX_EXACT = 2**53  # from here on float64 skips whole numbers

Kind = Literal["int", "float", "text", "flag"]

COUNTS = (
    *("B", "S", "prefill_requests", "prefill_tokens", "context_tokens", "prefill_context_tokens", "queued_requests"),
    *("step", "rep", "preemptions", "recomputed_tokens", "prefix_queries", "prefix_hits", "draft_tokens"),
    "accepted_tokens",
)
QUANTITIES = (
    *("T_ms", "period_ms", "t_s", "prefill_attention", "longest_prefill", "kv_usage", "window_ms", "window_steps"),
    *("arrived_requests", "B_sd", "S_sd", "wait_ms", "cell_rows"),
)
KINDS: dict[str, Kind] = {
    **dict.fromkeys(COUNTS, "int"),
    **dict.fromkeys(QUANTITIES, "float"),
    **dict.fromkeys(("run", "path", "phase", "replica"), "text"),
    **dict.fromkeys(("dummy", "idle", "warmup", "outlier"), "flag"),
}  # every column with a declared meaning
REQUIRED = ("B", "S", "T_ms")

IDENTITY = ("hardware", "model", "tp", "path")
"""Columns that identify a system: rows that differ in them never share a fit."""

PHASES = ("decode", "prefill", "mixed")


Array = NDArray[Any]
Coded = tuple[Array, list[str]]

WEIGHT = "cell_rows"  # column of a trace made of cells: how many measured steps a row represents


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """Steps by column (each of length n, never changed in place), with their provenance; codes: see `coded`."""

    columns: Mapping[str, Array]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    codes: dict[str, Coded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __repr__(self) -> str:
        named = [name for name in ("B", "S", "T_ms") if name in self and len(self)]
        spans = [f"{name} {number(float(self[name].min()))} to {number(float(self[name].max()))}" for name in named]
        return f"Trace of {', '.join([f'{len(self):,} steps', *spans])}"

    def to_pandas(self) -> Any:
        import pandas as pd

        return pd.DataFrame(dict(self.columns))

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def floats(self, name: str) -> FloatArray:
        return np.asarray(self.columns[name], dtype=np.float64)

    def floats_or_nan(self, name: str) -> FloatArray:
        return self.floats(name) if name in self else np.full(len(self), np.nan)

    def coded(self, name: str) -> Coded:
        """Return (code of each row (n,), text of each code) of a column; computed once, kept for selected rows."""
        if name not in self.codes:
            values = self[name].tolist()
            if set(map(type, values)) != {str}:  # such as lists, which may stand in a table
                values = list(map(str, values))
            known = {value: i for i, value in enumerate(dict.fromkeys(values))}
            self.codes[name] = np.fromiter(map(known.__getitem__, values), np.int32, len(values)), list(known)
        return self.codes[name]

    def select(self, rows: Array) -> "Trace":
        """Return the rows of a boolean mask or an index array, in that order."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        codes = {name: (code[rows], values) for name, (code, values) in self.codes.items()}
        return Trace({name: column[rows] for name, column in self.columns.items()}, self.provenance, codes)

    def only(self, names: Sequence[str]) -> "Trace":
        codes = {name: coded for name, coded in self.codes.items() if name in names}
        return Trace({name: self[name] for name in names if name in self}, self.provenance, codes)

    def with_columns(self, **columns: Array) -> "Trace":
        codes = {name: coded for name, coded in self.codes.items() if name not in columns}
        return Trace({**self.columns, **columns}, self.provenance, codes)

    def with_provenance(self, **facts: Any) -> "Trace":
        return Trace(self.columns, {**self.provenance, **facts}, self.codes)

    def labels(self) -> dict[str, Array]:
        return {name: self[name] for name in self.columns if name not in KINDS and name not in IDENTITY}

    def group(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Number the rows by their values in some columns (n,): 0, 1, ... in ascending order of the values."""
        group = np.zeros(len(self), dtype=np.intp)
        for name in names:
            if name in self and len(self):
                code = self._codes(name)
                group = distinct(group * (int(code.max()) + 1) + code)[1]
        return group

    def _codes(self, name: str) -> NDArray[np.intp]:
        if self[name].dtype != object:
            return distinct(self[name])[1]
        codes, texts = self.coded(name)
        return np.argsort(np.argsort(np.array(texts, dtype=np.str_)))[codes] if texts else codes.astype(np.intp)

    def identity(self) -> list[str]:
        """Return the identity columns that vary."""
        return [name for name in IDENTITY if name in self and self.group([name]).max(initial=0) > 0]

    def systems(self) -> Iterator[tuple[dict[str, str], "Trace"]]:
        """Yield ({varying identity column: value}, rows) of each system, in order of first appearance."""
        varying = self.identity()
        for part in self.split(varying) if varying else []:
            yield {name: str(self[name][part[0]]) for name in varying}, self.select(part)
        if not varying:
            yield {}, self

    def split(self, names: Sequence[str]) -> list[NDArray[np.intp]]:
        """Return the rows of each combination of values in some columns, in order of first appearance."""
        group = self.group(names)
        parts = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
        return sorted(parts, key=lambda rows: int(rows[0]) if len(rows) else 0)


def row_weights(trace: Trace) -> FloatArray | None:
    """Return how many measured steps each row represents (n,); None if each represents itself."""
    return np.nan_to_num(trace.floats(WEIGHT), nan=1.0) if WEIGHT in trace else None


def step_count(trace: Trace) -> int:
    weights = row_weights(trace)
    return len(trace) if weights is None else round(float(weights.sum()))


def concatenated(parts: Sequence[Trace], names: Sequence[str]) -> Trace:
    """Join traces in order. A column that a part lacks is NaN, empty or false there.

    Equal run names in two parts get their part's name in front, unless the parts are files of one recording, whose
    provenance names its run.
    """
    if len(parts) == 1:
        return parts[0]
    columns = {}
    for column in dict.fromkeys(name for part in parts for name in part.columns):
        kind = next(part[column].dtype.kind for part in parts if column in part)
        missing: Any = {"b": np.False_, "O": np.array("", dtype=object)}.get(kind, np.nan)
        columns[column] = np.concatenate(
            [part[column] if column in part else np.repeat(missing, len(part)) for part in parts]
        )
    runs = [list(map(str, part["run"].tolist())) if "run" in part else [""] * len(part) for part in parts]
    seen = Counter(run for part in runs for run in set(part))
    columns["run"] = np.array(
        [
            run if run and (seen[run] == 1 or "run" in part.provenance) else f"{name}: {run}".rstrip(": ")
            for part, name, labels in zip(parts, names, runs, strict=True)
            for run in labels
        ],
        dtype=object,
    )
    return Trace(columns, {"parts": {name: dict(part.provenance) for name, part in zip(names, parts, strict=True)}})


DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"
UNKNOWN = "prefill or mixed"  # a step with more tokens than requests, if nothing shows whether some of them decode


def phases(trace: Trace) -> NDArray[np.object_]:
    """Return the phase of each row (n,): the trace's own, else from its columns."""
    if "phase" in trace:
        codes, texts = trace.coded("phase")
        return np.array(texts, dtype=object)[codes]
    B, S = trace.floats("B"), trace.floats("S")
    if "prefill_tokens" in trace:
        prefill = trace.floats("prefill_tokens")
        return np.where(prefill == 0, DECODE, np.where(prefill >= S, PREFILL, MIXED)).astype(object)
    return np.where(S == B, DECODE, UNKNOWN).astype(object)


Mask = NDArray[np.bool_]

OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: np.isin,
    ast.NotIn: lambda column, values: ~np.isin(column, values),
}
MAX_SHOWN = 200  # characters of a long filter that an error repeats

_SQL_STYLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b(?:and|or|not|in)\b|(?<![<>=!])=(?!=)", re.IGNORECASE)


def matching_rows(trace: Trace, expression: str) -> Mask:
    """Return the mask (n,) of the rows that match. Raises WrongUsage that points at the mistake."""
    try:
        tree = ast.parse(_SQL_STYLE.sub(_as_python, expression.strip()), mode="eval").body
        return _evaluate(tree, trace, expression)
    except SyntaxError as error:
        raise _mistake(expression, f"not a filter ({error.msg})", (error.offset or 1) - 1) from None
    except (ValueError, RecursionError, MemoryError):
        raise _mistake(expression, "not a filter", 0) from None


def _as_python(token: re.Match[str]) -> str:
    return repr(token[0][1:-1]) if token[0][0] in "'\"" else token[0].lower().replace("=", "==")


def _evaluate(node: ast.expr, trace: Trace, expression: str) -> Mask:
    match node:
        case ast.BoolOp(op=op, values=parts):
            masks = [_evaluate(part, trace, expression) for part in parts]
            return np.asarray((np.logical_and if isinstance(op, ast.And) else np.logical_or).reduce(masks))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_evaluate(operand, trace, expression)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            name = ast.unparse(left)
            if name not in trace:
                reason = f"there is no column {name!r} (there are {', '.join(trace.columns)})"
                raise _mistake(expression, reason, left.col_offset)
            column = trace[name]
            is_list = isinstance(op, ast.In | ast.NotIn)
            listed = right.elts if is_list and isinstance(right, ast.Tuple | ast.List) else [right]
            values = [_literal(each, column, expression) for each in listed]
            return np.asarray(OPERATORS[type(op)](column, values if is_list else values[0]))
    raise _mistake(expression, "a comparison is missing", node.col_offset)


def _literal(node: ast.expr, column: NDArray[Any], expression: str) -> str | float:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _mistake(expression, "a number or a quoted text is missing", node.col_offset)
    if (column.dtype.kind in "OUST") != isinstance(value, str):
        kind = "numbers" if isinstance(value, str) else "texts"
        raise _mistake(expression, f"{value!r} does not compare with a column of {kind}", node.col_offset)
    return value if isinstance(value, str) else float(value)


def _mistake(expression: str, reason: str, place: int) -> WrongUsage:
    return WrongUsage(
        f"{reason}, at character {place + 1} of {expression[:MAX_SHOWN]!r}",
        where="--where",
        remedy="Write comparisons joined by and, or, not, such as: hardware == 'h100' and tp in (4, 8)",
    )
