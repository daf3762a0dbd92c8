"""Latfit's own trace file: Parquet with zstd, schema version and provenance under the metadata key `latfit`.

Numbers, flags and texts pass between NumPy and Arrow by their buffers: Arrow's own conversion of any array imports
pandas first, half a second that most commands have no other use for. Texts pass as numbers of a dictionary, and the
file declares them as plain texts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from latfit.errors import BadInput, WrongUsage, first_line
from latfit.files import dumps, write_whole
from latfit.inputs import decode_json, unreadable
from latfit.memory import absurd_size, check_memory
from latfit.trace.columns import BY_NAME, SCHEMA
from latfit.trace.table import Array, Trace

METADATA_KEY = b"latfit"
OBJECTS = ("cells", "parts")
"""Entries of a provenance that are objects themselves."""
MOST_LETTERS = 250
"""Of a label, which names something; what is longer is cut."""
WHOLE = 2**53
"""From here on float64 skips whole numbers."""
LARGEST_B = 2**31 - 1
CHUNK_BYTES = 1 << 20
"""Read at once of a column."""
COPIES = 3
"""Of a column, in memory at a time."""
COPY_AGAIN = "It may be cut short: copy or make it again."
OTHER_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx")


def write_trace(target: Path, trace: Trace) -> None:
    """Write `trace` whole or not at all. Raises TargetNotWritable."""
    table = _table(trace)
    _write(target, table.schema, iter([table]), trace.provenance)


def write_chunks(
    target: Path, kinds: Mapping[str, Any], chunks: Iterator[Trace], provenance: Mapping[str, Any]
) -> None:
    """Write a trace that comes in parts, whole or not at all. kinds: the Arrow type of each column."""
    import pyarrow as pa

    schema = pa.schema(list(kinds.items()))
    _write(target, schema, (_table(chunk).select(list(kinds)).cast(schema) for chunk in chunks), provenance)


def _write(target: Path, schema: Any, tables: Iterator[Any], provenance: Mapping[str, Any]) -> None:
    import pyarrow.parquet as pq

    metadata = {METADATA_KEY.decode(): dumps({"schema": SCHEMA, "provenance": dict(provenance)})}

    def write(stream: BinaryIO) -> None:
        repeated = [name for name in schema.names if name != "t_s"]  # no two of which are the same
        options = {"compression": "zstd", "use_dictionary": repeated, "store_schema": False}
        with pq.ParquetWriter(stream, schema, **options) as writer:
            for table in tables:
                writer.write_table(table)
            writer.add_key_value_metadata(metadata)

    write_whole(target, write)


def _table(trace: Trace) -> Any:
    import pyarrow as pa

    return pa.table({name: _stored(name, trace) for name in trace.columns})


def read_parquet(source: Path, name: str | None = None) -> Trace:
    """Every column of a Parquet file, latfit's own or anybody's. Raises BadInput (under `name`) where it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = name or str(source)
    try:
        # by its name: Arrow's threads that read a Python file bring the program down where they outlive it
        with pq.ParquetFile(str(source)) as file:
            labels = [field.name for field in file.schema_arrow if _is_text(field.type)]
            check_memory(COPIES * _decoded_bytes(file.metadata), where, "Summarise it with --cells, in flat memory.")
        with pq.ParquetFile(str(source), read_dictionary=labels) as file:
            table = file.read()
    except OSError as error:
        raise (unreadable(source, error) if error.errno else _damaged(source, where, error)) from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(source, where, error) from None
    return Trace(columns_of(table, where), provenance_of(where, table.schema.metadata))


def stored_provenance(source: Path) -> dict[str, Any]:
    """The provenance of a trace without its rows, empty where the file is none. Raises BadInput for another schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(str(source)).metadata
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return {}
    return provenance_of(str(source), metadata)


def chunks_of(source: Path, where: str, rows: int) -> Iterator[Trace]:
    """Every column of a Parquet file, some rows at a time, with the provenance. Raises BadInput."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(str(source), pre_buffer=False, buffer_size=CHUNK_BYTES) as file:
            labels = [field.name for field in file.schema_arrow if _is_text(field.type)]
            origin = provenance_of(where, file.schema_arrow.metadata)
        with pq.ParquetFile(str(source), read_dictionary=labels, pre_buffer=False, buffer_size=CHUNK_BYTES) as file:
            for batch in file.iter_batches(rows):
                yield Trace(columns_of(pa.Table.from_batches([batch]), where), origin)
    except OSError as error:
        raise (unreadable(source, error) if error.errno else _damaged(source, where, error)) from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(source, where, error) from None


def _decoded_bytes(metadata: Any) -> int:
    """About what the columns take in memory: what is stored, decompressed, and eight bytes a value."""
    # Of groups, not of their columns: a damaged one of those ends the process, by an error in C++ that nobody catches.
    stored = sum(max(metadata.row_group(i).total_byte_size, 0) for i in range(metadata.num_row_groups))
    return int(stored + 8 * max(metadata.num_rows, 0) * metadata.num_columns)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return any(holds(kind) for holds in (types.is_string, types.is_large_string, types.is_binary))


def columns_of(table: Any, where: str) -> dict[str, Array]:
    """Columns of a pyarrow table by name. Raises BadInput where two share a name, or one names labels there are not."""
    try:
        names = [name.strip() for name in table.column_names]
    except UnicodeDecodeError:
        raise BadInput("a column name is not UTF-8", where=where, remedy="Save it as UTF-8.") from None
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"two columns are called {twice!r}", where=where, remedy="Rename one of them.")
    try:
        return {name: _loaded(table.column(i)) for i, name in enumerate(names)}
    except IndexError as error:
        raise BadInput(f"not a whole table ({error})", where=where, remedy=COPY_AGAIN) from None


def label(value: str | bytes | None) -> str | None:
    """A text that can be written and is not too long; a missing one stays so."""
    if value is None:
        return None
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    if not text.isascii():
        text = text.encode(errors="replace").decode()
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _damaged(source: Path, where: str, error: Exception) -> Exception:
    """The error for a file that breaks off or is wrong inside; lack of memory stays what it is."""
    if isinstance(error, MemoryError) and not absurd_size(error, source):
        return error
    return BadInput(
        f"not a whole Parquet file ({first_line(error)})",
        where=where,
        remedy=COPY_AGAIN,
    )


def provenance_of(where: str, metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """The provenance in a file's metadata, empty where it is not latfit's. Raises BadInput for another schema."""
    stored = (metadata or {}).get(METADATA_KEY)
    if stored is None:
        return {}
    try:
        document = decode_json(stored)
    except ValueError:
        document = None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise BadInput(
            f"trace schema {str(found)[:MOST_LETTERS]!r} is not {SCHEMA!r}",
            where=where,
            remedy="It comes from another version of latfit: update latfit, or measure again.",
        )
    provenance = document.get("provenance")
    if not isinstance(provenance, dict):
        return {}
    return {name: fact for name, fact in provenance.items() if name not in OBJECTS or isinstance(fact, dict)}


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
    if (
        kind == "int"
        and column.dtype.kind == "f"
        and np.all(np.abs(column) < WHOLE)
        and np.all(column == np.rint(column))
    ):
        column = column.astype(np.int64)
    if name == "B" and column.dtype.kind == "i" and np.all((column >= -LARGEST_B) & (column <= LARGEST_B)):
        column = column.astype(np.int32)
    if column.dtype.kind == "O" and set(map(type, column.tolist())) == {str}:
        codes, values = trace.coded(name)
        texts = [value.encode(errors="replace") for value in values]
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
    if pa.types.is_dictionary(kind) and _is_text(kind.value_type):
        # Arrow does not look whether texts of a file are UTF-8
        plain = pa.large_binary() if pa.types.is_large_string(kind.value_type) else pa.binary()
        spelt = [label(value) for value in chunk.dictionary.view(plain).to_pylist()]
        texts: Array = np.array([*spelt, None], dtype=object)
        places = _values(chunk.indices)
        if chunk.null_count:
            places = np.where(np.isnan(places), -1, places).astype(np.intp)
        # Arrow does not look whether the file holds the texts that it names
        if len(places) and not (-1 if chunk.null_count else 0) <= places.min() <= places.max() < len(spelt):
            raise IndexError(f"a label outside the {len(spelt)} that it holds")
        labels: Array = texts[places]
        return labels
    numeric = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
    if numeric and len(chunk):
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
