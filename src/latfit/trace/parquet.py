"""Latfit's own trace file: Parquet with zstd, schema version and provenance under the metadata key `latfit`."""

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from latfit.errors import BadInput, WrongUsage
from latfit.files import dumps, unreadable, write_whole
from latfit.trace.columns import BY_NAME, SCHEMA
from latfit.trace.table import Array, Trace

METADATA_KEY = b"latfit"
OTHER_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx")


def write_trace(target: Path, trace: Trace) -> None:
    """Write `trace` whole or not at all. Raises TargetNotWritable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = {METADATA_KEY: dumps({"schema": SCHEMA, "provenance": dict(trace.provenance)}).encode()}
    table = pa.table({name: _stored(name, column) for name, column in trace.columns.items()})
    table = table.replace_schema_metadata(metadata)

    def write(stream: BinaryIO) -> None:
        pq.write_table(table, stream, compression="zstd")

    write_whole(target, write)


def read_parquet(source: Path, name: str | None = None) -> Trace:
    """Every column of a Parquet file, latfit's own or anybody's. Raises BadInput (under `name`) where it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = name or str(source)
    try:
        with source.open("rb") as stream:
            table = pq.read_table(stream)
    except OSError as error:
        raise (unreadable(source, error) if error.errno else _damaged(where, error)) from None
    except pa.ArrowException as error:
        raise _damaged(where, error) from None
    return Trace(columns_of(table, where), _provenance(where, table.schema.metadata))


def columns_of(table: Any, where: str) -> dict[str, Array]:
    """Columns of a pyarrow table by name. Raises BadInput where two share a name."""
    try:
        names = [name.strip() for name in table.column_names]
    except UnicodeDecodeError:
        raise BadInput("a column name is not UTF-8", where=where, remedy="Save it as UTF-8.") from None
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"two columns are called {twice!r}", where=where, remedy="Rename one of them.")
    return {name: _loaded(table.column(i)) for i, name in enumerate(names)}


def _damaged(where: str, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0]
    return BadInput(
        f"not a whole Parquet file ({reason})", where=where, remedy="It may be cut short: copy or make it again."
    )


def _provenance(where: str, metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    stored = (metadata or {}).get(METADATA_KEY)
    if stored is None:
        return {}
    document = json.loads(stored)
    if document.get("schema") != SCHEMA:
        raise BadInput(
            f"trace schema {document.get('schema')!r} is not {SCHEMA!r}",
            where=where,
            remedy="It comes from another version of latfit: update latfit, or measure again.",
        )
    provenance: dict[str, Any] = document.get("provenance", {})
    return provenance


def check_trace_name(target: Path, option: str = "--out") -> None:
    """Raises WrongUsage for the name of another kind of table: traces are Parquet, whatever they are called."""
    if target.suffix.lower() in OTHER_TABLES:
        raise WrongUsage(
            f"a trace is written as Parquet, not {target.suffix}",
            where=f"{option} {target}",
            remedy=f"Name it {target.with_suffix('.parquet').name}.",
        )


def _stored(name: str, column: Array) -> Array:
    """B as int32 and S as int64 where they are whole, as `formats.md` has them; the rest as it is."""
    kind = BY_NAME[name].kind if name in BY_NAME else None
    if kind == "int" and column.dtype.kind == "f" and np.all(np.mod(column, 1) == 0):
        column = column.astype(np.int64)
    if name == "B" and column.dtype.kind == "i":
        return column.astype(np.int32)
    return column


def _loaded(column: Any) -> Array:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array: Array = column.to_numpy()
    return array
