"""latfit's trace file: Parquet with zstd, schema version and provenance under the metadata key `latfit`.

Arrays pass between NumPy and Arrow by their buffers, because Arrow's own conversions import pandas (0.5 s).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from latfit.errors import BadInput, WrongUsage, first_line
from latfit.files import dumps, write_whole
from latfit.inputs import decode_json, unreadable
from latfit.memory import check_memory
from latfit.trace.metadata import Metadata
from latfit.trace.table import KINDS, MAX_EXACT, Array, Trace

METADATA_KEY = b"latfit"
MAX_LABEL_CHARS = 250
MAX_INT32 = 2**31 - 1
COPIES = 3  # of a column in memory while it is read
COPY_AGAIN = "It may be cut short or damaged: copy or make it again."
OTHER_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx")


def write_trace(target: Path, trace: Trace) -> None:
    """Write a trace whole or not at all. Raises TargetNotWritable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: _to_arrow(name, trace) for name in trace.columns})
    metadata = {METADATA_KEY.decode(): dumps(Metadata(trace.provenance).to_json())}

    def write(stream: BinaryIO) -> None:
        repeating = [name for name in table.column_names if name != "t_s"]
        options = {"compression": "zstd", "use_dictionary": repeating, "store_schema": False}
        with pq.ParquetWriter(stream, table.schema, write_page_checksum=True, **options) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(metadata)

    write_whole(target, write)


def read_parquet(source: Path, name: str | None = None) -> Trace:
    """Read every column of a Parquet file. Raises BadInput (under `name`)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = name or str(source)
    try:
        # By name: Arrow's threads that read a Python file bring the program down if they outlive it.
        with pq.ParquetFile(str(source)) as file:
            texts = [field.name for field in file.schema_arrow if _is_text(field.type)]
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            size = sum(max(each.total_byte_size, 0) for each in groups)
            size += 8 * max(file.metadata.num_rows, 0) * file.metadata.num_columns
            check_memory(COPIES * size, where, "Summarise it with --cells, in flat memory.")
        with pq.ParquetFile(str(source), read_dictionary=texts, page_checksum_verification=True) as file:
            table = file.read()
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise unreadable(source, error) from None
        reason = f"not a whole Parquet file ({first_line(error)})"
        raise BadInput(reason, where=where, remedy=COPY_AGAIN) from None
    return Trace(columns_of(table, where), provenance_of(where, table.schema.metadata))


def stored_provenance(source: Path) -> dict[str, Any]:
    """Return the provenance of a trace without its rows; empty for other files. Raises BadInput for another schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(str(source)).metadata
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return {}
    return provenance_of(str(source), metadata)


def provenance_of(where: str, metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the provenance in a file's metadata; empty if it is not latfit's. Raises BadInput for another schema."""
    stored = (metadata or {}).get(METADATA_KEY)
    if stored is None:
        return {}
    try:
        return dict(Metadata.from_json(decode_json(stored), where).provenance)
    except ValueError as error:
        raise BadInput(f"not a latfit trace ({first_line(error)})", where=where, remedy=COPY_AGAIN) from None


def check_trace_name(target: Path, option: str = "--out") -> None:
    """Raise WrongUsage if a trace, which is Parquet, would be named like another kind of table."""
    if target.suffix.lower() in OTHER_TABLES:
        raise WrongUsage(
            f"a trace is written as Parquet, not {target.suffix}",
            where=f"{option} {target}",
            remedy=f"Name it {target.with_suffix('.parquet').name}.",
        )


def columns_of(table: Any, where: str) -> dict[str, Array]:
    """Return the columns of a pyarrow table. Raises BadInput for equal names, or texts that the file lacks."""
    try:
        names = [name.strip() for name in table.column_names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadInput(f"two columns are called {twice!r}", where=where, remedy="Rename one of them.")
        chunks = [table.column(i).chunks or [table.column(i).combine_chunks()] for i in range(len(names))]
        return {name: np.concatenate(list(map(_values, column))) for name, column in zip(names, chunks, strict=True)}
    except (IndexError, UnicodeDecodeError) as error:
        raise BadInput(f"not a whole table ({error})", where=where, remedy=COPY_AGAIN) from None


def label(value: str) -> str:
    text = value if value.isascii() else value.encode(errors="replace").decode()
    return text if len(text) <= MAX_LABEL_CHARS else f"{text[: MAX_LABEL_CHARS - 1]}…"


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))


def _to_arrow(name: str, trace: Trace) -> Any:
    import pyarrow as pa

    column = trace[name]
    if (
        KINDS.get(name) == "int"
        and column.dtype.kind == "f"
        and np.all((np.abs(column) < MAX_EXACT) & (column == np.rint(column)))
    ):
        column = column.astype(np.int64)
    if name == "B" and column.dtype.kind == "i" and np.all(np.abs(column) <= MAX_INT32):
        column = column.astype(np.int32)
    if column.dtype.kind == "O" and set(map(type, column.tolist())) <= {str}:
        codes, values = trace.coded(name)
        texts = [value.encode(errors="replace") for value in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        dictionary = _arrow_array(pa.string(), len(texts), ends, np.frombuffer(b"".join(texts), dtype=np.uint8))
        places = _arrow_array(pa.int32(), len(codes), codes.astype(np.int32))
        return pa.DictionaryArray.from_arrays(places, dictionary)
    if column.dtype.kind == "b":
        return _arrow_array(pa.bool_(), len(column), np.packbits(column, bitorder="little"))
    if column.dtype.kind in "iuf":
        return _arrow_array(pa.from_numpy_dtype(column.dtype), len(column), column)
    return pa.array(column)


def _arrow_array(kind: Any, length: int, *buffers: Array) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(kind, length, [None, *(pa.py_buffer(np.ascontiguousarray(b)) for b in buffers)])


def _values(chunk: Any) -> Array:
    """Return the values of an Arrow array: missing numbers are NaN, other missing values None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = chunk.type
    if pa.types.is_dictionary(kind) and _is_text(kind.value_type):
        return _texts(chunk)
    if pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
        if chunk.null_count:
            return _filled(chunk.cast(pa.float64(), safe=False), np.nan)
        return np.from_dlpack(chunk)
    if pa.types.is_boolean(kind) and not chunk.null_count:
        return np.from_dlpack(pc.cast(chunk, pa.uint8())).astype(bool)
    if pa.types.is_dictionary(kind):
        chunk = chunk.cast(kind.value_type)
    array: Array = chunk.to_numpy(zero_copy_only=False)
    return array


def _filled(chunk: Any, missing: float) -> Array:
    import pyarrow.compute as pc

    filler = _arrow_array(chunk.type, 1, np.array([missing], dtype=chunk.type.to_pandas_dtype()))
    return np.from_dlpack(pc.coalesce(chunk, filler[0]))


def _texts(chunk: Any) -> Array:
    import pyarrow as pa

    values = chunk.dictionary.to_pylist()
    texts = [str(value, errors="replace") if isinstance(value, bytes) else value for value in values]
    places = _filled(chunk.indices.cast(pa.int64()), len(texts))
    if len(places) and not 0 <= places.min() <= places.max() <= len(texts) - (chunk.null_count == 0):
        raise IndexError(f"a label outside the {len(texts)} that it holds")
    found: Array = np.array([*map(label, texts), None], dtype=object)[places]
    return found
