"""HardwareProfile: what is known of a machine, as data. `hardware.json`, schema `latfit.hardware/1`.

It holds whole fits, not names of files: a plan made from it can be repeated when the fit files are gone. A path without
a measurement holds nominal numbers instead, and is marked as such wherever it is used.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from latfit.errors import BadInput, WrongUsage
from latfit.files import read_json, write_json
from latfit.hardware.ceiling import Ceiling
from latfit.hardware.nominal import Nominal, parse_nominal
from latfit.model import FitResult, fit_from_json

SCHEMA = "latfit.hardware/1"
MAKE = "latfit fit trace.parquet"

CPU_PATHS = ("amx", "cpu")
GPU_PATHS = ("gpu",)


@dataclass(frozen=True, repr=False)
class ExecutionPath:
    """Where a batch can run, and how long it takes there.

    nominal: its numbers where nothing is measured; `fit` then holds them as a linear model.  ceiling: what the
    machine could do at best.  price_per_hour: what it costs, in any one currency.
    """

    name: str
    fit: FitResult
    nominal: Nominal | None = None
    ceiling: Ceiling = field(default_factory=Ceiling)
    price_per_hour: float | None = None

    @property
    def label(self) -> str:
        """The name, with a mark where its numbers are nominal."""
        return f"{self.name} (nominal)" if self.nominal else self.name

    def __repr__(self) -> str:
        return f"<ExecutionPath {self.label}: {self.nominal.text if self.nominal else f'{self.fit.model} fit'}>"

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name, value in asdict(self.ceiling).items() if value is not None}
        entry: dict[str, Any] = {"nominal": self.nominal.text} if self.nominal else {"fit": self.fit.to_json()}
        if known:
            entry["ceiling"] = known
        if self.price_per_hour is not None:
            entry["price_per_hour"] = self.price_per_hour
        return entry


@dataclass(frozen=True, repr=False)
class HardwareProfile:
    """Execution paths by name."""

    paths: Mapping[str, ExecutionPath] = field(default_factory=dict)

    def with_path(self, path: ExecutionPath) -> "HardwareProfile":
        """A profile in which `path` stands under its name, new or in place of an older one, whose ceiling and price
        stay where the new one says nothing of them."""
        if path.name in self.paths:
            old = self.paths[path.name]
            price = old.price_per_hour if path.price_per_hour is None else path.price_per_hour
            path = replace(path, ceiling=old.ceiling.updated(path.ceiling), price_per_hour=price)
        return HardwareProfile({**self.paths, path.name: path})

    def first_of(self, names: tuple[str, ...]) -> ExecutionPath | None:
        """The first path there is among `names`: AMX before plain CPU, for example."""
        return next((self.paths[name] for name in names if name in self.paths), None)

    def __repr__(self) -> str:
        return f"<HardwareProfile {', '.join(path.label for path in self.paths.values()) or 'without paths'}>"

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "paths": {name: path.to_json() for name, path in self.paths.items()}}


def nominal_path(name: str, numbers: Nominal) -> ExecutionPath:
    """A path with nominal numbers in place of a measurement."""
    return ExecutionPath(name, numbers.as_fit(), numbers)


def read_hardware(source: Path) -> HardwareProfile:
    """The profile in `source`. Raises BadInput."""
    return profile_from_json(read_json(source, what="hardware profile", made_by=MAKE), str(source))


def profile_from_json(document: Any, where: str) -> HardwareProfile:
    """The profile in a decoded document. Raises BadInput, with the place in it."""
    if (
        not isinstance(document, dict)
        or document.get("schema") != SCHEMA
        or not isinstance(document.get("paths"), dict)
    ):
        raise BadInput("not a latfit hardware profile", where=where, remedy=f"Make one with `{MAKE}`.")
    return HardwareProfile(
        {name: _path(name, entry, f"{where}, path {name!r}") for name, entry in document["paths"].items()}
    )


def add_path(target: Path, *paths: ExecutionPath) -> HardwareProfile:
    """Enter `paths` into the profile at `target`, which is made where there is none; others stay as they are."""
    profile = read_hardware(target) if target.exists() else HardwareProfile()
    for path in paths:
        profile = profile.with_path(path)
    write_json(target, profile.to_json())
    return profile


def _path(name: str, entry: Any, where: str) -> ExecutionPath:
    if not isinstance(entry, dict):
        raise BadInput("not an execution path", where=where, remedy="Add it again with `latfit hardware add`.")
    known = {f.name for f in fields(Ceiling)}
    try:
        numbers = {k: float(v) for k, v in entry.get("ceiling", {}).items() if k in known}
        price = entry.get("price_per_hour")
        ceiling, hourly = Ceiling(**numbers), None if price is None else float(price)
        given = entry.get("nominal", entry.get("quoted"))  # "quoted" in files of latfit 0.1
        if given is not None:
            path = nominal_path(name, parse_nominal(str(given)))
            return replace(path, ceiling=ceiling, price_per_hour=hourly)
    except (WrongUsage, TypeError, ValueError, AttributeError) as error:
        raise BadInput(
            f"not an execution path ({error})", where=where, remedy="Add it again with `latfit hardware add`."
        ) from None
    return ExecutionPath(name, fit_from_json(entry.get("fit"), where), None, ceiling, hourly)
