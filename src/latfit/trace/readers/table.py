"""Tables of anybody's: Parquet, Feather or Arrow, CSV and its like, and JSON lines of flat objects.

Which column is B, which S, which T: by the user's map, by latfit's names, or by names that say so. Names are guessed
only where one column fits and none has latfit's name. The unit of T comes from --unit, or from the name (`latency_us`),
or is milliseconds; a median that no step takes in that unit asks for --unit.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import BadInput, first_line
from latfit.memory import absurd_size, check_memory
from latfit.trace.columns import BY_NAME, REQUIRED
from latfit.trace.parquet import COPIES, columns_of, label, read_parquet
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.request_lists import EXTEND, PAST, with_request_terms
from latfit.trace.readers.source import Source
from latfit.trace.readers.text import Tally, header_of, number, numbers, read_delimited, records, starts_as_json, texts
from latfit.trace.table import Array, Trace
from latfit.units import MS_PER_UNIT, format_ms

SYNONYMS = {
    "B": ("b", "batch", "batch_size", "num_reqs"),
    "S": ("s", "tokens", "num_tokens", "total_tokens"),
    "T_ms": ("t_ms",),
}
TIMED = re.compile(r"(?:latency|time|duration)(?:_(ns|us|µs|μs|ms|s))?")

SHORTEST_MS, LONGEST_MS = 0.005, 1e5
TYPICAL_MS = 20.0


@dataclass(frozen=True)
class Named:
    """Columns under latfit's names, the milliseconds that one unit of T is, and what was guessed."""

    columns: dict[str, Array]
    ms_per_unit: float
    guessed: Mapping[str, str]


def named_columns(found: Mapping[str, Array], options: Options, where: str) -> Named:
    """The columns with --map applied and obvious names understood. Raises BadInput where one is missing or unclear."""
    given = options.column_map
    missing = [theirs for theirs in given.values() if theirs not in found]
    if missing:
        raise BadInput(
            f"no column {', '.join(missing)} (there are {_listed(found)})",
            where=where,
            remedy="Correct --map, for example --map B=batch,S=tokens,T_ms=latency.",
        )
    guessed = _guessed(found, options, where)
    mapping = {**given, **guessed}
    taken = set(mapping.values()) | set(mapping)
    columns = {ours: found[theirs] for ours, theirs in mapping.items()}
    columns |= {name: column for name, column in found.items() if name not in taken}
    if lacking := [name for name in REQUIRED if name not in columns]:
        raise BadInput(
            f"no column {', '.join(lacking)} (there are {_listed(found)})",
            where=where,
            remedy="Say which columns they are, for example --map B=batch,S=tokens,T_ms=latency.",
        )
    unit = options.unit or _unit_in(guessed.get("T_ms", ""))
    return Named(columns, MS_PER_UNIT[unit or "ms"], guessed)


def check_unit(T_ms: Array, options: Options, where: str) -> None:
    """Raises BadInput where T is so short or long that its unit must be another, and none was given."""
    positive = T_ms[np.isfinite(T_ms) & (T_ms > 0)]
    if options.unit is not None or not len(positive):
        return
    median = float(np.median(positive))
    if SHORTEST_MS <= median <= LONGEST_MS:
        return
    likely = min(("s", "us", "ns"), key=lambda unit: abs(math.log(median) + math.log(MS_PER_UNIT[unit] / TYPICAL_MS)))
    raise BadInput(
        f"the median step takes {format_ms(median)}: T looks like {likely}, not ms",
        where=where,
        remedy=f"Say its unit with --unit {likely}, or --unit ms if that is right.",
    )


def provenance_of(named: Named) -> dict[str, Any]:
    """What was guessed, for the record."""
    return {"column_map": dict(named.guessed)} if named.guessed else {}


def _guessed(found: Mapping[str, Array], options: Options, where: str) -> dict[str, str]:
    guessed = {}
    free = [name for name in found if name not in options.column_map.values()]
    for ours in REQUIRED:
        if ours in found or ours in options.column_map:
            continue
        candidates = [name for name in free if _fits(ours, name, options.unit)]
        if len(candidates) > 1:
            raise BadInput(
                f"{ours} may be any of the columns {', '.join(candidates)}",
                where=where,
                remedy=f"Say which with --map, for example --map {ours}={candidates[0]}.",
            )
        if candidates:
            guessed[ours] = candidates[0]
    _check_unit_agrees(guessed.get("T_ms", ""), options.unit, where)
    return guessed


def _fits(ours: str, name: str, unit: str | None) -> bool:
    plain = _plain(name)
    if plain in SYNONYMS[ours]:
        return True
    timed = TIMED.fullmatch(plain) if ours == "T_ms" else None
    return timed is not None and (timed.group(1) is not None or unit is not None)


def _check_unit_agrees(name: str, unit: str | None, where: str) -> None:
    told = _unit_in(name)
    if told and unit and MS_PER_UNIT[told] != MS_PER_UNIT[unit]:
        raise BadInput(
            f"the column {name} is in {told} by its name, but --unit says {unit}",
            where=where,
            remedy=f"Leave --unit out, or say that the name is wrong with --map T_ms={name}.",
        )


def _unit_in(name: str) -> str | None:
    plain = _plain(name)
    if plain in SYNONYMS["T_ms"]:
        return "ms"
    timed = TIMED.fullmatch(plain)
    return timed.group(1) if timed else None


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _listed(names: Mapping[str, Array]) -> str:
    shown = list(names)
    return ", ".join(shown[:12]) + (f", and {len(shown) - 12} more" if len(shown) > 12 else "")


PARQUET_MAGIC = b"PAR1"
ARROW_FILE_MAGIC = b"ARROW1"
OLD_FEATHER_MAGIC = b"FEA1"
ARROW_STREAM_MAGIC = b"\xff\xff\xff\xff"
MOST_COLUMNS = 4096


def recognises(head: bytes) -> bool:
    """Parquet, Feather, Arrow, JSON, or text whose first line has at least two columns."""
    return _is_binary(head) or starts_as_json(head) or bool(header_of(head))


def read(source: Source, options: Options) -> Trace:
    """The table as a trace. Cells that are not numbers where numbers belong become NaN, for cleaning to count."""
    found = _found(source)
    # a trace that latfit wrote is in milliseconds
    return steps_of(found, options, source.name, in_ms=_is_binary(source.head) and bool(found.provenance))


def steps_of(found: Trace, options: Options, where: str, *, in_ms: bool = False) -> Trace:
    """A table under the names of its source as steps. in_ms: whether T is known to be. Raises BadInput."""
    named = named_columns(found.columns, options, where)
    listed, refused = with_request_terms(named.columns)
    columns = {name: typed(name, column) for name, column in listed.items()}
    with np.errstate(over="ignore"):  # what is no time in any unit is dropped by cleaning
        columns["T_ms"] = columns["T_ms"] * named.ms_per_unit
    if not in_ms:
        check_unit(columns["T_ms"], options, where)
    return Trace(columns, {**found.provenance, **provenance_of(named), **refused})


def read_columns(source: Source, required: Sequence[str]) -> Trace:
    """A table that need not hold latencies, with latfit's own column names. Raises BadInput where one is missing."""
    return typed_columns(_found(source), required, source.name)


def typed_columns(found: Trace, required: Sequence[str], where: str) -> Trace:
    """A table with latfit's own column names, each in its kind. Raises BadInput where one is missing or has gaps."""
    if missing := [name for name in required if name not in found]:
        raise BadInput(
            f"no column {', '.join(missing)} (there are {', '.join(found.columns)})",
            where=where,
            remedy=f"Give a table with the columns {', '.join(required)}.",
        )
    columns = {name: typed(name, column) for name, column in found.columns.items()}
    columns |= {name: numbers(columns[name]) for name in required}
    broken = np.logical_or.reduce([~np.isfinite(columns[name]) for name in required])
    if broken.any():
        raise BadInput(
            f"row {int(np.argmax(broken)) + 1} has no number in {' or '.join(required)}",
            where=where,
            remedy="Correct or leave out the row.",
        )
    return Trace(columns, found.provenance)


def _found(source: Source) -> Trace:
    """What the container holds, under the names of the file."""
    if _is_binary(source.head):
        return _read_binary(source)
    if starts_as_json(source.head):
        return _read_json(source)
    table = read_delimited(source)
    return Trace(table.columns, Tally(bad=table.bad_lines).facts())


def _is_binary(head: bytes) -> bool:
    return head.startswith((PARQUET_MAGIC, ARROW_FILE_MAGIC, OLD_FEATHER_MAGIC, ARROW_STREAM_MAGIC))


def _read_binary(source: Source) -> Trace:
    import pyarrow as pa

    if source.compression is not None:
        raise BadInput(
            f"a table in a {source.compression} file",
            where=source.name,
            remedy="Decompress it: Parquet and Feather are compressed inside.",
        )
    try:
        if source.head.startswith(PARQUET_MAGIC):
            return read_parquet(source.path, source.name)
        return Trace(columns_of(_arrow_table(source), source.name))
    except MemoryError as error:
        if not absurd_size(error, source.path):
            raise
        raise _not_whole(source, first_line(error)) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _not_whole(source, first_line(error)) from None


def _not_whole(source: Source, reason: str) -> BadInput:
    return BadInput(
        f"not a whole table ({reason})", where=source.name, remedy="It may be cut short: copy or make it again."
    )


def _arrow_table(source: Source) -> Any:
    """The table, checked: a damaged one would lead outside its buffers."""
    import pyarrow as pa
    from pyarrow import ipc

    if source.head.startswith(OLD_FEATHER_MAGIC):
        raise BadInput(
            "is in the first version of Feather, which Arrow no longer reads",
            where=source.name,
            remedy="Save it again in the second version (or as Parquet).",
        )
    with pa.OSFile(str(source.path)) as stream:
        is_stream = source.head.startswith(ARROW_STREAM_MAGIC)
        reader = (ipc.open_stream if is_stream else ipc.open_file)(stream)
        found, size = [], 0
        for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
            found.append(batch)
            size += batch.nbytes
            check_memory(COPIES * size, source.name, "Turn it into Parquet and summarise it with --cells.")
        table = pa.Table.from_batches(found, reader.schema)
    table.validate(full=True)
    return table


def _read_json(source: Source) -> Trace:
    """Flat objects as columns; a value that is itself an object or a list is left out, but lists of requests."""
    tally = Tally()
    columns: dict[str, list[Any]] = {}
    for row, record in enumerate(records(source, tally)):
        for name, value in record.items():
            if not isinstance(value, (dict, list)) or name in (EXTEND, PAST):
                columns.setdefault(str(label(name.strip())), [None] * row)[row:] = [value]
        if len(columns) > MOST_COLUMNS:
            raise BadInput(
                f"has more than {MOST_COLUMNS} different keys",
                where=source.name,
                remedy="Give a table: one object a step, with the same keys in each.",
            )
        for column in columns.values():
            if len(column) == row:
                column.append(None)
    schema = str(columns.get("schema", [""])[0])
    if schema.startswith("latfit."):
        found = f"is what latfit wrote ({schema}), not a trace"
        raise BadInput(found, where=source.name, remedy="Give the trace or the log that was measured.")
    if not columns:
        raise BadInput(
            "holds no flat JSON object",
            where=source.name,
            remedy='Give one object a line: of a step {"B": 1, "S": 1, "T_ms": 9.5}, of a request {"t_s": 0.5,'
            ' "prompt_tokens": 20, "output_tokens": 8}.',
        )
    return Trace({name: _array(column) for name, column in columns.items()}, tally.facts())


def _array(values: list[Any]) -> Array:
    """Integers and floats as such, so that a label keeps its look; anything else as objects."""
    kinds = {type(value) for value in values}
    if kinds == {int} and all(abs(value) < 1 << 63 for value in values):
        return np.array(values, dtype=np.int64)
    if kinds <= {int, float, type(None)} and kinds & {int, float}:
        return np.array([number(value) for value in values], dtype=np.float64)
    found = np.empty(len(values), dtype=object)  # filled as it is: lists of one length are no second dimension
    found[:] = values
    return found


def typed(name: str, column: Array) -> Array:
    """The column in its declared kind; a label that is not declared keeps numbers and is text otherwise."""
    kind = BY_NAME[name].kind if name in BY_NAME else None
    if kind in ("int", "float"):
        return _seconds(column) if column.dtype.kind == "M" else numbers(column)
    if kind == "text":
        return texts(column)
    if kind == "flag" and column.dtype.kind == "b":
        return column
    if kind == "flag":
        return np.array([is_set(value) for value in column.tolist()], dtype=bool)
    return texts(column) if column.dtype.kind == "O" else column


def is_set(value: object) -> bool:
    """Whether a flag is: true, 1 and their spellings; anything else is not."""
    return isinstance(value, bool | int | float | str) and value in (True, "true", "True", "1")


def _seconds(moments: Array) -> Array:
    """Points in time as seconds from the first of them."""
    known = moments[~np.isnat(moments)]
    first = known.min() if len(known) else moments[:1]
    return np.asarray((moments - first) / np.timedelta64(1, "s"), dtype=np.float64)


READER = Reader("table", "a table with columns B, S and T_ms, or others with --map", recognises, read)
