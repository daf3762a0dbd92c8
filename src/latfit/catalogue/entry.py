"""Entries of the catalogue: a fit with what it was measured on. LATFIT_CATALOG precedes shipped ones."""

import difflib
import gzip
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from latfit.errors import BadInput, WrongUsage
from latfit.files import write_json
from latfit.model import FitResult
from latfit.records import Record

PREFIX = "catalog:"
FOLDER = "LATFIT_CATALOG"
SHIPPED = Path(__file__).parent / "systems"
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*/[a-z0-9][a-z0-9.@-]*")
KERNELS, STEPS = "kernels", "steps"  # the GPU's kernels alone, or a serving engine's steps with their host time


class CatalogEntry(Record, frozen=True, kw_only=True, tag_field="schema", tag="latfit.catalog/1"):
    """A fitted system."""

    what = "catalogue entry"
    made_by = "latfit catalog add"

    name: str
    gpu: str
    model: str
    tp: int = 1
    dtype: str = ""
    engine: str = ""
    contents: str  # of a step: KERNELS or STEPS
    lacks: str = ""
    B: tuple[float, float]  # measured range
    S: tuple[float, float]
    steps: int
    error_pct: float | None  # mean, on held-out steps
    weights: float | None = None  # parameters of the model, all read by a step
    licence: str = ""
    source: str = ""
    fit: dict[str, Any]

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name[:40]!r} is not like gpu/model")


def all_entries() -> dict[str, CatalogEntry]:
    """Return every entry by name. Raises BadInput."""
    return {name: read_entry(file) for name, file in sorted(_files().items())}


def entry_named(name: str) -> CatalogEntry:
    """Return an entry by its name, with or without `catalog:`. Raises WrongUsage with the nearest names, BadInput."""
    plain, files = name.removeprefix(PREFIX), _files()
    if plain not in files:
        near = difflib.get_close_matches(plain, files, 3, 0.3)
        similar = f"Similar: {', '.join(near)}. " if near else ""
        remedy = f"{similar}`latfit catalog show` lists all."
        raise WrongUsage(f"no entry {plain!r}", where=PREFIX.rstrip(":"), remedy=remedy)
    return read_entry(files[plain])


def fit_of(entry: CatalogEntry) -> FitResult:
    return FitResult.from_json(entry.fit, f"{PREFIX}{entry.name}")


def add_entry(entry: CatalogEntry, folder: Path | None = None) -> Path:
    """Write an entry into a folder, by default LATFIT_CATALOG. Raises WrongUsage, TargetNotWritable."""
    folder = folder or _own_folder()
    if folder is None:
        raise WrongUsage("no folder for own entries", where=FOLDER, remedy=f"export {FOLDER}=~/latfit-catalog")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{entry.name.replace('/', '--')}.json"
    write_json(file, entry.to_json())
    return file


def read_entry(file: Path) -> CatalogEntry:
    try:
        content = file.read_bytes()
        document = msgspec.json.decode(gzip.decompress(content) if file.suffix == ".gz" else content)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError):
        remedy = "Add it again (latfit catalog add), or install latfit again."
        raise BadInput("is damaged", where=str(file), remedy=remedy) from None
    return CatalogEntry.from_json(document, str(file))


def _own_folder() -> Path | None:
    found = os.environ.get(FOLDER)
    return Path(found).expanduser() if found else None


def _files() -> Mapping[str, Path]:
    folders = [folder for folder in (SHIPPED, _own_folder()) if folder is not None]
    files = [file for folder in folders for file in folder.glob("*.json*")]
    return {file.name.removesuffix(".gz").removesuffix(".json").replace("--", "/"): file for file in files}
