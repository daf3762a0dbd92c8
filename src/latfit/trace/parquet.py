"""Latfit's own trace file: Parquet with zstd, schema version and provenance under the metadata key `latfit`.

Numbers, flags and texts pass between NumPy and Arrow by their buffers: Arrow's own conversion of any array imports
pandas first, half a second that most commands have no other use for. Texts pass as numbers of a dictionary, and the
file declares them as plain texts.
"""

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

    metadata = {METADATA_KEY.decode(): dumps({"schema": SCHEMA, "provenance": dict(trace.provenance)})}
    table = pa.table({name: _stored(name, trace) for name in trace.columns})

    def write(stream: BinaryIO) -> None:
        with pq.ParquetWriter(stream, table.schema, compression="zstd", store_schema=False) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(metadata)

    write_whole(target, write)


def read_parquet(source: Path, name: str | None = None) -> Trace:
    """Every column of a Parquet file, latfit's own or anybody's. Raises BadInput (under `name`) where it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = name or str(source)
    try:
        with source.open("rb") as stream:
            labels = [field.name for field in pq.read_schema(stream) if pa.types.is_string(field.type)]
            stream.seek(0)
            table = pq.ParquetFile(stream, read_dictionary=labels).read()
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


def _stored(name: str, trace: Trace) -> Any:
    """B as int32 and S as int64 where they are whole, as `formats.md` has them; the rest as it is."""
    import pyarrow as pa

    column = trace[name]
    kind = BY_NAME[name].kind if name in BY_NAME else None
    if kind == "int" and column.dtype.kind == "f" and np.all(np.mod(column, 1) == 0):
        column = column.astype(np.int64)
    if name == "B" and column.dtype.kind == "i":
        column = column.astype(np.int32)
    if column.dtype.kind == "O" and set(map(type, column.tolist())) == {str}:
        codes, values = trace.coded(name)
        texts = [value.encode() for value in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        dictionary = _wrapped(pa.string(), len(texts), ends, np.frombuffer(b"".join(texts), dtype=np.uint8))
        return pa.DictionaryArray.from_arrays(_wrapped(pa.int32(), len(codes), codes.astype(np.int32)), dictionary)
    if column.dtype.kind == "b":
        return _wrapped(pa.bool_(), len(column), np.packbits(column, bitorder="little"))
    if column.dtype.kind in "iuf":
        return _wrapped(pa.from_numpy_dtype(column.dtype), len(column), column)
    return pa.array(column)


def _wrapped(kind: Any, length: int, *buffers: Array) -> Any:
    """An Arrow array without missing values."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, length, [None, *(pa.py_buffer(np.ascontiguousarray(b)) for b in buffers)])


def _loaded(column: Any) -> Array:
    """The values of an Arrow column; where some are missing, numbers are float64 with NaN, others objects with None."""
    if column.num_chunks == 0:
        array: Array = column.to_numpy()
        return array
    return np.concatenate([_values(chunk) for chunk in column.chunks])


def _values(chunk: Any) -> Array:
    import pyarrow as pa

    kind, there = chunk.type, slice(chunk.offset, chunk.offset + len(chunk))
    if pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type):
        texts: Array = np.array([*chunk.dictionary.to_pylist(), None], dtype=object)
        places = _values(chunk.indices)
        if chunk.null_count:
            places = np.where(np.isnan(places), -1, places).astype(np.intp)
        labels: Array = texts[places]
        return labels
    plain = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
    if plain and len(chunk):
        mask, content = chunk.buffers()
        numbers: Array = np.frombuffer(content, dtype=kind.to_pandas_dtype(), count=there.stop)[there]
        if not chunk.null_count:
            return numbers
        known = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=there.stop, bitorder="little")[there]
        return np.where(known, numbers, np.nan)
    if pa.types.is_boolean(kind) and len(chunk) and not chunk.null_count:
        bits = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
        return np.unpackbits(bits, count=there.stop, bitorder="little")[there].astype(bool)
    if pa.types.is_dictionary(kind):
        chunk = chunk.cast(kind.value_type)
    array: Array = chunk.to_numpy(zero_copy_only=False)
    return array
