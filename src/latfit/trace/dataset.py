"""A folder of Parquet files, here or on object storage, as parts that fit in memory and can be read anywhere.

All footers are read first: what is not a trace is found before the long pass, and the number of rows is known. A part
is some row groups of one file; within it rows come in batches. Files whose name starts with `_` or `.` are markers of
the programs that wrote the folder and are passed over.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from latfit.errors import BadInput
from latfit.trace.schema import BY_NAME, REQUIRED

PART_ROWS = 4 << 20
BATCH_ROWS = 1 << 18
STREAM_BYTES = 1 << 20
FOOTERS_AT_ONCE = 8


@dataclass(frozen=True)
class Part:
    """Row groups of one file, with their number of rows."""

    path: str
    row_groups: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Dataset:
    """Parts of all good files under `root` (by path), and (file, reason) of the others."""

    filesystem: Any
    root: str
    files: int
    parts: tuple[Part, ...]
    unreadable: tuple[tuple[str, str], ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


def open_dataset(source: str | Path, column_map: Mapping[str, str], filesystem: Any = None) -> Dataset:
    """Find and check the files of a folder, or the one file, at a path or URI (`s3://…`) of a pyarrow filesystem.

    Raises BadInput where there is no such place or no file in it.
    """
    filesystem, root = _located(source, filesystem)
    paths = _files(filesystem, root, str(source))
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        found = list(pool.map(partial(_parts_of, filesystem, column_map=column_map), paths))
    parts = tuple(part for parts_or_reason in found if isinstance(parts_or_reason, list) for part in parts_or_reason)
    unreadable = tuple((path, reason) for path, reason in zip(paths, found, strict=True) if isinstance(reason, str))
    return Dataset(filesystem, root, len(paths), parts, unreadable)


def batches(filesystem: Any, part: Part, wanted: Sequence[str], column_map: Mapping[str, str]) -> Iterator[Any]:
    """Record batches of a part with those of the `wanted` columns that the file has, under latfit's names."""
    import pyarrow.parquet as pq

    with filesystem.open_input_file(part.path) as stream:
        file = pq.ParquetFile(stream, buffer_size=STREAM_BYTES)
        present = set(file.schema_arrow.names)
        theirs = {name: column_map.get(name, name) for name in wanted}
        names = [name for name in theirs if theirs[name] in present and not _shadowed(name, column_map)]
        for row_group in part.row_groups:
            columns = list(dict.fromkeys(theirs[name] for name in names))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[row_group], columns=columns):
                yield batch.select([theirs[name] for name in names]).rename_columns(names)


def _shadowed(name: str, column_map: Mapping[str, str]) -> bool:
    """Whether the file's own column of this name has been mapped to another."""
    return name not in column_map and name in column_map.values()


def _located(source: str | Path, filesystem: Any) -> tuple[Any, str]:
    import pyarrow as pa
    from pyarrow import fs

    if filesystem is not None:
        return filesystem, str(source)
    if "://" not in str(source):
        return fs.LocalFileSystem(), str(Path(source).resolve())
    try:
        found, path = fs.FileSystem.from_uri(str(source))
    except (pa.ArrowException, OSError) as error:
        raise BadInput(
            f"cannot be opened ({first_line(error)})",
            where=str(source),
            remedy="Give a path, or a URI such as s3://bucket/folder, gs://bucket/folder or hdfs://host/folder.",
        ) from None
    return found, path


def _files(filesystem: Any, root: str, shown: str) -> list[str]:
    from pyarrow import fs

    try:
        info = filesystem.get_file_info(root)
        if info.type == fs.FileType.File:
            return [root]
        inside = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except OSError as error:
        remedy = "Check the name, and that it can be read from here."
        raise BadInput(f"cannot be listed ({first_line(error)})", where=shown, remedy=remedy) from None
    paths = sorted(
        entry.path
        for entry in inside
        if entry.type == fs.FileType.File
        and not any(step.startswith(("_", ".")) for step in entry.path.removeprefix(root).split("/"))
    )
    if not paths:
        raise BadInput("holds no file", where=shown, remedy="Name the folder that holds the Parquet files of a trace.")
    return paths


def _parts_of(filesystem: Any, path: str, column_map: Mapping[str, str]) -> list[Part] | str:
    """The parts of a file, or why it cannot be read as a trace."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with filesystem.open_input_file(path) as stream:
            footer = pq.ParquetFile(stream)
            schema, metadata = footer.schema_arrow, footer.metadata
            if reason := _column_reason(schema, column_map):
                return reason
            return _split(path, [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        return f"not a whole Parquet file ({first_line(error)})"


def _column_reason(schema: Any, column_map: Mapping[str, str]) -> str | None:
    import pyarrow as pa

    for name in REQUIRED:
        theirs = column_map.get(name, name)
        if schema.names.count(theirs) != 1 or _shadowed(name, column_map):
            there = ", ".join(schema.names[:12])
            return f"{'no column' if theirs not in schema.names else 'two columns'} {theirs} (there are {there})"
    for name in BY_NAME:
        theirs = column_map.get(name, name)
        if BY_NAME[name].kind in ("int", "float") and theirs in schema.names:
            kind = schema.field(theirs).type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
                return f"column {theirs} holds {kind}, not numbers"
    return None


def _split(path: str, rows: Sequence[int]) -> list[Part]:
    """Row groups in file order, gathered until a part has PART_ROWS."""
    parts: list[Part] = []
    gathered: list[int] = []
    size = 0
    for i, number in enumerate(rows):
        gathered.append(i)
        size += number
        if size >= PART_ROWS or i == len(rows) - 1:
            parts.append(Part(path, tuple(gathered), size))
            gathered, size = [], 0
    return parts


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
