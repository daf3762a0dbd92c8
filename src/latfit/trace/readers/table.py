"""Read anybody's tables: Parquet, Feather or Arrow, delimited text, and JSON lines of flat objects.

B, S and T are found by the user's map, by latfit's names, or by names that say so, if exactly one column fits.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from latfit.errors import BadInput, first_line, located
from latfit.trace.parquet import COPY_AGAIN, columns_of, label, read_parquet
from latfit.trace.readers.engines import EXTEND, PAST, with_request_terms
from latfit.trace.readers.source import (
    Options,
    Reader,
    Source,
    Tally,
    header_of,
    number,
    numbers,
    read_delimited,
    records,
    starts_as_json,
    texts,
)
from latfit.trace.table import KINDS, REQUIRED, Array, Trace
from latfit.units import MS_PER_UNIT, format_ms

SYNONYMS = {
    "B": "b|batch|batch_size|num_reqs",
    "S": "s|tokens|num_tokens|total_tokens",
    "T_ms": "(?:t(?=_ms)|latency|time|duration)(?:_(ns|us|µs|μs|ms|s))?",
}  # names by which a required column is guessed; that of T may end in its unit

MIN_MEDIAN_MS, MAX_MEDIAN_MS = 0.005, 1e5  # outside, T is in another unit
TYPICAL_MS = 20.0

PARQUET_MAGIC = b"PAR1"
ARROW_FILE_MAGIC = b"ARROW1"
ARROW_STREAM_MAGIC = b"\xff\xff\xff\xff"
MAX_COLUMNS = 4096
MAX_TABLE_BYTES = 1 << 42  # a buffer that is said to hold more is damaged


def name_columns(names: Sequence[str], options: Options) -> tuple[dict[str, str], dict[str, str], str]:
    """Return {our name: the table's name}, by map and guesses, the guesses alone, and T's unit. Raises BadInput."""
    given = options.column_map
    example = "--map B=batch,S=tokens,T_ms=latency"
    if missing := [theirs for theirs in given.values() if theirs not in names]:
        raise _no_column(missing, names, f"Correct --map, for example {example}.")
    guessed: dict[str, str] = {}
    unit = None
    for ours in [ours for ours in REQUIRED if ours not in names and ours not in given]:
        plain = {name: re.sub(r"[\s-]+", "_", name.strip().lower()) for name in names if name not in given.values()}
        fitting = {name: match for name in plain if (match := re.fullmatch(SYNONYMS[ours], plain[name]))}
        if ours == "T_ms":
            fitting = {name: match for name, match in fitting.items() if match[1] or options.unit}
        if len(fitting) > 1:
            raise BadInput(
                f"{ours} may be any of the columns {', '.join(fitting)}",
                remedy=f"Say which with --map, for example --map {ours}={next(iter(fitting))}.",
            )
        if fitting:
            guessed[ours] = next(iter(fitting))
            unit = fitting[guessed[ours]][1] if ours == "T_ms" else None
    mapping = {**given, **guessed}
    taken = {*mapping, *mapping.values()}
    mapping |= {name: name for name in names if name not in taken}
    if lacking := [name for name in REQUIRED if name not in mapping]:
        raise _no_column(lacking, names, f"Say which columns they are, for example {example}.")
    if unit and options.unit and MS_PER_UNIT[unit] != MS_PER_UNIT[options.unit]:
        raise BadInput(
            f"the column {guessed['T_ms']} is in {unit} by its name, but --unit says {options.unit}",
            remedy=f"Leave --unit out, or say that the name is wrong with --map T_ms={guessed['T_ms']}.",
        )
    return mapping, guessed, options.unit or unit or "ms"


def _no_column(missing: Iterable[str], names: Sequence[str], remedy: str) -> BadInput:
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    found = f"no column {', '.join(missing)} (there are {', '.join(names[:12])}{more})"
    return BadInput(found, remedy=remedy)


def check_unit(T_ms: Array, options: Options) -> None:
    """Raise BadInput if T is so short or long that its unit must be another, and none was given."""
    positive = T_ms[np.isfinite(T_ms) & (T_ms > 0)]
    if options.unit is not None or not len(positive):
        return
    median = float(np.median(positive))
    if MIN_MEDIAN_MS <= median <= MAX_MEDIAN_MS:
        return
    likely = min(("s", "us", "ns"), key=lambda unit: abs(math.log(median) + math.log(MS_PER_UNIT[unit] / TYPICAL_MS)))
    raise BadInput(
        f"the median step takes {format_ms(median)}: T looks like {likely}, not ms",
        remedy=f"Say its unit with --unit {likely}, or --unit ms if that is right.",
    )


def recognises(head: bytes) -> bool:
    """Return whether this is Parquet, Feather, Arrow, JSON, or text whose first line has at least two columns."""
    return _is_binary(head) or starts_as_json(head) or bool(header_of(head))


def read(source: Source, options: Options) -> Trace:
    with located(source.name):
        table = _read_table(source)
        # A trace that latfit wrote is in milliseconds.
        return steps_of(table, options, in_ms=_is_binary(source.head) and bool(table.provenance))


def steps_of(table: Trace, options: Options, *, in_ms: bool = False) -> Trace:
    """Return a table under the names of its source as steps. in_ms: skip the check of the unit. Raises BadInput."""
    mapping, guessed, unit = name_columns(list(table.columns), options)
    listed, refused = with_request_terms({ours: table[theirs] for ours, theirs in mapping.items()})
    columns = {name: typed(name, column) for name, column in listed.items()}
    with np.errstate(over="ignore"):  # cleaning drops what is no time in any unit
        columns["T_ms"] = columns["T_ms"] * MS_PER_UNIT[unit]
    if not in_ms:
        check_unit(columns["T_ms"], options)
    return Trace(columns, {**table.provenance, **({"column_map": guessed} if guessed else {}), **refused})


def read_columns(source: Source, required: Sequence[str]) -> Trace:
    with located(source.name):
        return typed_columns(_read_table(source), required)


def typed_columns(table: Trace, required: Sequence[str]) -> Trace:
    """Convert each column to its declared kind. Raises BadInput if a required one is missing or has gaps."""
    if missing := [name for name in required if name not in table]:
        raise _no_column(missing, [*table.columns], f"Give a table with the columns {', '.join(required)}.")
    columns = {name: typed(name, column) for name, column in table.columns.items()}
    columns |= {name: numbers(columns[name]) for name in required}
    broken = np.logical_or.reduce([~np.isfinite(columns[name]) for name in required])
    if broken.any():
        reason = f"row {int(np.argmax(broken)) + 1} has no number in {' or '.join(required)}"
        raise BadInput(reason, remedy="Correct or leave out the row.")
    return Trace(columns, table.provenance)


def _read_table(source: Source) -> Trace:
    if _is_binary(source.head):
        return _read_binary(source)
    tally = Tally()
    columns = _read_json(source, tally) if starts_as_json(source.head) else read_delimited(source, tally)
    return Trace(columns, dict(+tally))


def _is_binary(head: bytes) -> bool:
    return head.startswith((PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC))


def _read_binary(source: Source) -> Trace:
    import pyarrow as pa
    from pyarrow import ipc

    if source.compression is not None:
        remedy = "Decompress it: Parquet and Feather are compressed inside."
        raise BadInput(f"a table in a {source.compression} file", remedy=remedy)
    if source.head.startswith(PARQUET_MAGIC):
        return read_parquet(source.path, source.name)
    try:
        with pa.OSFile(str(source.path)) as stream:
            is_stream = source.head.startswith(ARROW_STREAM_MAGIC)
            table = (ipc.open_stream if is_stream else ipc.open_file)(stream).read_all()
        table.validate(full=True)  # a damaged one would lead outside its buffers
        return Trace(columns_of(table, source.name))
    except (pa.ArrowException, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        asked = re.search(r"size (\d+)", str(error))
        if isinstance(error, MemoryError) and not (asked and int(asked[1]) > MAX_TABLE_BYTES):
            raise
        reason = f"not a whole table ({first_line(error)})"
        raise BadInput(reason, remedy=COPY_AGAIN) from None


def _read_json(source: Source, tally: Tally) -> dict[str, Array]:
    columns: dict[str, list[Any]] = {}
    rows = 0
    for rows, record in enumerate(records(source, tally), start=1):
        for name, value in record.items():
            if not isinstance(value, (dict, list)) or name in (EXTEND, PAST):
                column = columns.setdefault(label(name.strip()), [])
                column += [None] * (rows - 1 - len(column))
                column[rows - 1 :] = [value]
        if len(columns) > MAX_COLUMNS:
            remedy = "Give a table: one object a step, with the same keys in each."
            raise BadInput(f"has more than {MAX_COLUMNS} different keys", remedy=remedy)
    for column in columns.values():
        column += [None] * (rows - len(column))
    schema = str(columns.get("schema", [""])[0])
    if schema.startswith("latfit."):
        found = f"is what latfit wrote ({schema}), not a trace"
        raise BadInput(found, remedy="Give the trace or the log that was measured.")
    if not columns:
        raise BadInput(
            "holds no flat JSON object",
            remedy='Give one object a line: of a step {"B": 1, "S": 1, "T_ms": 9.5}, of a request {"t_s": 0.5,'
            ' "prompt_tokens": 20, "output_tokens": 8}.',
        )
    return {name: _as_array(column) for name, column in columns.items()}


def _as_array(values: list[Any]) -> Array:
    """Return integers and floats as such, so that a label keeps its look; anything else as objects."""
    kinds = {type(value) for value in values}
    if kinds == {int} and all(abs(value) < 1 << 63 for value in values):
        return np.array(values, dtype=np.int64)
    if kinds <= {int, float, type(None)} and kinds & {int, float}:
        return np.array([number(value) for value in values], dtype=np.float64)
    found = np.empty(len(values), dtype=object)  # np.array would make lists of one length a second dimension
    found[:] = values
    return found


def typed(name: str, column: Array) -> Array:
    """Convert a column to its declared kind; an undeclared label keeps numbers and is text otherwise."""
    kind = KINDS.get(name)
    if kind in ("int", "float") and column.dtype.kind == "M":  # points in time: seconds from the first of them
        first = np.fmin.reduce(column) if len(column) else column
        return np.asarray((column - first) / np.timedelta64(1, "s"), dtype=np.float64)
    if kind in ("int", "float"):
        return numbers(column)
    if kind == "flag" and column.dtype.kind != "b":
        true = (True, "true", "True", "1")
        return np.array([isinstance(each, int | float | str) and each in true for each in column.tolist()], bool)
    return texts(column) if kind == "text" or column.dtype.kind == "O" else column


READER = Reader("table", "a table with columns B, S and T_ms, or others with --map", recognises, read)
