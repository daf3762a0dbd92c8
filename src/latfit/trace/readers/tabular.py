"""Tables: Parquet, and CSV or TSV with a header, whose columns a map may rename and a unit may scale."""

from collections.abc import Mapping

import numpy as np

from latfit.errors import BadInput
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.source import Source
from latfit.trace.schema import BY_NAME, REQUIRED
from latfit.trace.store import columns_of, read_parquet
from latfit.trace.table import Array, Trace
from latfit.units import MS_PER_UNIT

PARQUET_MAGIC = b"PAR1"


def recognises(head: bytes) -> bool:
    """Parquet, or text whose first line has at least two columns."""
    if head.startswith(PARQUET_MAGIC):
        return True
    header = head.partition(b"\n")[0]
    return b"\0" not in head and (b"," in header or b"\t" in header)


def read(source: Source, options: Options) -> Trace:
    """The table as a trace. Cells that are not numbers where numbers belong become NaN, for cleaning to count."""
    is_parquet = source.head.startswith(PARQUET_MAGIC)
    found = read_parquet(source.path, source.name) if is_parquet else Trace(_read_csv(source))
    renamed = _renamed(found, options.column_map, source)
    _check_columns(renamed, source)
    columns = {name: _typed(name, column) for name, column in renamed.items()}
    columns["T_ms"] = columns["T_ms"] * MS_PER_UNIT[options.unit or "ms"]
    return Trace(columns, found.provenance)


def _read_csv(source: Source) -> dict[str, Array]:
    import pyarrow as pa
    from pyarrow import csv

    header = source.head.partition(b"\n")[0]
    options = csv.ParseOptions(delimiter="\t" if header.count(b"\t") > header.count(b",") else ",")
    try:
        with source.open() as stream:
            table = csv.read_csv(stream, parse_options=options)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise BadInput(
            f"not a table ({reason})", where=source.name, remedy="Give a trace in Parquet, or CSV with a header line."
        ) from None
    return columns_of(table, source.name)


def _renamed(found: Trace, column_map: Mapping[str, str], source: Source) -> dict[str, Array]:
    missing = [theirs for theirs in column_map.values() if theirs not in found]
    if missing:
        raise BadInput(
            f"no column {', '.join(missing)} (there are {_names(found.columns)})",
            where=source.name,
            remedy="Correct --map, for example --map B=batch,S=tokens,T_ms=latency.",
        )
    taken = set(column_map.values()) | set(column_map)
    kept = {name: column for name, column in found.columns.items() if name not in taken}
    return {**{ours: found[theirs] for ours, theirs in column_map.items()}, **kept}


def _check_columns(columns: Mapping[str, Array], source: Source) -> None:
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise BadInput(
            f"no column {', '.join(missing)} (there are {_names(columns)})",
            where=source.name,
            remedy="Say which columns they are, for example --map B=batch,S=tokens,T_ms=latency.",
        )


def _typed(name: str, column: Array) -> Array:
    """The column in its declared kind; a label that is not declared stays as it is."""
    kind = BY_NAME[name].kind if name in BY_NAME else None
    if kind in ("int", "float"):
        return _numbers(column)
    if kind == "text":
        return np.array(["" if value is None else str(value) for value in column.tolist()], dtype=object)
    if kind == "flag":
        return np.array([value in (True, 1, "true", "True", "1") for value in column.tolist()], dtype=bool)
    return column


def _numbers(column: Array) -> Array:
    if column.dtype.kind in "iuf":
        return column.astype(np.float64)
    return np.array([_number(value) for value in column.tolist()], dtype=np.float64)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")


def _names(columns: Mapping[str, Array]) -> str:
    names = list(columns)
    return ", ".join(names[:12]) + (f", and {len(names) - 12} more" if len(names) > 12 else "")


READER = Reader("table", "a table with columns B, S and T_ms, or others with --map", recognises, read)
