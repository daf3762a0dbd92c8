"""HardwareProfile: execution paths with their fits. `hardware.json`, schema `latfit.hardware/1`.

It holds whole fits, so that a plan can be repeated when the fit files are gone. A path without a measurement holds
nominal numbers, and is marked wherever it is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from latfit.errors import BadInput, WrongUsage
from latfit.files import dumps, rewrite
from latfit.hardware.ceiling import Ceiling
from latfit.hardware.nominal import Nominal, parse_nominal
from latfit.hardware.precedence import differing, refusal, replacement
from latfit.inputs import read_json
from latfit.messages import Message as LatfitWarning
from latfit.model import FitResult, fit_from_json

SCHEMA = "latfit.hardware/1"
MAKE = "latfit fit trace.parquet"

CPU_PATHS = ("amx", "cpu")
GPU_PATHS = ("gpu",)


def path_label(name: str, *, nominal: bool) -> str:
    """Return a path's name with a mark if its numbers are nominal."""
    return f"{name} (nominal)" if nominal else name


@dataclass(frozen=True, repr=False)
class ExecutionPath:
    """Where a batch can run, and how long it takes there. price_per_hour: in any one currency.

    nominal: its numbers where nothing is measured; `fit` then holds them as a linear model.
    """

    name: str
    fit: FitResult
    nominal: Nominal | None = None
    ceiling: Ceiling = field(default_factory=Ceiling)
    price_per_hour: float | None = None

    @property
    def label(self) -> str:
        """The name, with a mark where its numbers are nominal."""
        return path_label(self.name, nominal=self.nominal is not None)

    def __repr__(self) -> str:
        return f"<ExecutionPath {self.label}: {self.nominal.text if self.nominal else f'{self.fit.name} fit'}>"

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

    def with_path(self, path: ExecutionPath, *, force: bool = False) -> "HardwareProfile":
        """Return a profile with `path` in place of any older one. Raises WrongUsage if that takes force.

        Ceiling and price of the older one stay where the new one has none, unless they are of another system.
        """
        if path.name in self.paths:
            old = self.paths[path.name]
            if not force and (refused := refusal(old, path)):
                raise WrongUsage(refused.message, remedy=refused.remedy)
            if not differing(old, path):
                price = old.price_per_hour if path.price_per_hour is None else path.price_per_hour
                path = replace(path, ceiling=old.ceiling.updated(path.ceiling), price_per_hour=price)
        return HardwareProfile({**self.paths, path.name: path})

    def without(self, name: str) -> "HardwareProfile":
        """Return the profile without a path. Raises WrongUsage that names the paths."""
        if name not in self.paths:
            known = ", ".join(self.paths)
            raise WrongUsage(
                f"no path {name!r}",
                where="PATH",
                remedy=f"There are: {known}." if known else "The profile holds no path.",
            )
        return HardwareProfile({known: path for known, path in self.paths.items() if known != name})

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


@dataclass(frozen=True)
class Entered:
    """A profile with new paths: what they replaced, and why others were refused, by name."""

    profile: HardwareProfile
    replaced: tuple[str, ...] = ()
    refused: Mapping[str, LatfitWarning] = field(default_factory=dict)


def add_path(target: Path, *paths: ExecutionPath, force: bool = False) -> Entered:
    """Enter paths into the profile at `target`, which is made if missing; several processes may do so at once.

    Other paths stay as they are, and so do those that only force may replace.
    """
    found = Entered(HardwareProfile())

    def enter(profile: HardwareProfile) -> HardwareProfile:
        nonlocal found
        replaced, refused = [], {}
        for path in paths:
            old = profile.paths.get(path.name)
            if old is not None and not force and (why := refusal(old, path)):
                refused[path.name] = why
                continue
            if old is not None and (sentence := replacement(old, path)):
                replaced.append(sentence)
            profile = profile.with_path(path, force=force)
        found = Entered(profile, tuple(replaced), refused)
        return profile

    change_hardware(target, enter)
    return found


def change_hardware(target: Path, change: Callable[[HardwareProfile], HardwareProfile]) -> None:
    """Replace the profile at `target`, or an empty one, by what `change` returns, which may be called again.

    Raises BadInput, TargetNotWritable.
    """

    def content() -> str:
        return dumps(change(read_hardware(target) if target.exists() else HardwareProfile()).to_json()) + "\n"

    rewrite(target, content)


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
