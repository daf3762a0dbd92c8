"""HardwareProfile: what is known of a machine, as data. `hardware.json`, schema `latfit.hardware/1`.

It holds whole fits, not names of files: a plan made from it can be repeated when the fit files are gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latfit.errors import BadInput
from latfit.files import read_json, write_json
from latfit.model.result import FitResult, fit_from_json

SCHEMA = "latfit.hardware/1"
DEFAULT_FILE = "hardware.json"
DEFAULT_PATH = "cpu"

CPU_PATHS = ("amx", "cpu")
GPU_PATHS = ("gpu",)


@dataclass(frozen=True)
class ExecutionPath:
    """Where a batch can run, and how long it takes there."""

    name: str
    fit: FitResult


@dataclass(frozen=True)
class HardwareProfile:
    """Execution paths by name."""

    paths: Mapping[str, ExecutionPath] = field(default_factory=dict)

    def with_path(self, path: ExecutionPath) -> "HardwareProfile":
        """A profile in which `path` stands under its name, new or in place of an older one."""
        return HardwareProfile({**self.paths, path.name: path})

    def first_of(self, names: tuple[str, ...]) -> ExecutionPath | None:
        """The first path there is among `names`: AMX before plain CPU, for example."""
        return next((self.paths[name] for name in names if name in self.paths), None)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "paths": {name: {"fit": path.fit.to_json()} for name, path in self.paths.items()}}


def read_hardware(source: Path) -> HardwareProfile:
    """The profile in `source`. Raises BadInput."""
    document = read_json(source, what="hardware profile", made_by="latfit fit trace.parquet")
    if (
        not isinstance(document, dict)
        or document.get("schema") != SCHEMA
        or not isinstance(document.get("paths"), dict)
    ):
        raise BadInput(
            "not a latfit hardware profile", where=str(source), remedy="Make one with `latfit fit trace.parquet`."
        )
    paths = {}
    for name, entry in document["paths"].items():
        stored = entry.get("fit") if isinstance(entry, dict) else None
        paths[name] = ExecutionPath(name, fit_from_json(stored, f"{source}, path {name!r}"))
    return HardwareProfile(paths)


def add_path(target: Path, path: ExecutionPath) -> HardwareProfile:
    """Enter `path` into the profile at `target`, which is made where there is none; other paths stay as they are."""
    known = read_hardware(target) if target.exists() else HardwareProfile()
    profile = known.with_path(path)
    write_json(target, profile.to_json())
    return profile
