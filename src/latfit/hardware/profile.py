"""HardwareProfile: execution paths with their fits. `hardware.json`, schema `latfit.hardware/1`.

It holds whole fits, so that a plan can be repeated without the fit files. Nominal numbers never replace a measurement,
nor does a measurement of another system, unless forced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from latfit.errors import WrongUsage, refuse
from latfit.files import dumps, rewrite
from latfit.hardware.ceiling import Ceiling
from latfit.hardware.nominal import Nominal, parse_nominal
from latfit.messages import Message, message
from latfit.model import FitResult, fitted_identity
from latfit.records import NotNegative, Record, to_builtins
from latfit.trace import SYSTEM, Fact, facts_beside
from latfit.units import format_percent

CPU_PATHS = ("amx", "cpu")
GPU_PATHS = ("gpu",)


def path_label(name: str, *, nominal: bool) -> str:
    return f"{name} (nominal)" if nominal else name


class ExecutionPath(Record, frozen=True):
    """Where a batch can run, and how long it takes there. price_per_hour: in any one currency.

    nominal: its numbers where nothing is measured; `fit` then holds them as a linear model.
    """

    what: ClassVar[str] = "execution path"
    made_by: ClassVar[str] = "latfit hardware add"

    name: str
    fit: FitResult
    nominal: Nominal | None = None
    ceiling: Ceiling = Ceiling()
    price_per_hour: NotNegative | None = None

    @property
    def label(self) -> str:
        return path_label(self.name, nominal=self.nominal is not None)

    @property
    def source(self) -> str:
        return f"nominal: {self.nominal.text}" if self.nominal else f"{self.fit.name}, {self.fit.metrics.n:,} steps"

    @property
    def origin(self) -> str:
        """`the measurement of 2026-11-01 (saturation, 6 % error)`, `the nominal numbers p50=2ms`."""
        if self.nominal:
            return f"the nominal numbers {self.nominal.text}"
        made = self.fit.provenance
        when = str(made.get("trace", {}).get("started") or made.get("created") or "").partition("T")[0]
        error = self.fit.cross_validation.mape_pct or self.fit.metrics.mape_pct
        about = self.fit.name if error is None else f"{self.fit.name}, {format_percent(error)} error"
        return f"the measurement{f' of {when}' if when else ''} ({about})"

    def __repr__(self) -> str:
        return f"<ExecutionPath {self.name}: {self.source}>"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"nominal": self.nominal.text} if self.nominal else {"fit": self.fit.to_json()}
        more = {"ceiling": self.ceiling.to_json() or None, "price_per_hour": self.price_per_hour}
        return found | {name: value for name, value in more.items() if value is not None}

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        text = document.get("nominal", document.get("quoted"))  # "quoted" in files of latfit 0.1
        nominal = None if text is None else parse_nominal(str(text), "nominal")
        fit = FitResult.from_json(document.get("fit"), "fit") if nominal is None else nominal.as_fit()
        return {**document, "fit": fit, "nominal": nominal}


def nominal_path(name: str, numbers: Nominal) -> ExecutionPath:
    return ExecutionPath(name, numbers.as_fit(), numbers)


def refusal(old: ExecutionPath, new: ExecutionPath) -> Message | None:
    """Return why `new` must not replace `old` unless forced; None where it may."""
    if old.nominal:
        return None
    if new.nominal:
        return message("measured", path=old.name, origin=old.origin)
    if not (apart := differing_facts(old, new)):
        return None
    facts = ", ".join(f"{fact.name} {fact.fitted}, not {fact.found}" for fact in apart)
    return message("another_system", path=old.name, origin=old.origin, facts=facts)


def replacement(old: ExecutionPath, new: ExecutionPath) -> str:
    held, given = (each.nominal.text if each.nominal else dumps(each.fit.to_json()) for each in (old, new))
    return "" if held == given else f"Path {old.name}: replaces {old.origin}."


def differing_facts(old: ExecutionPath, new: ExecutionPath) -> list[Fact]:
    """Return the facts in which two measured systems differ."""
    if old.nominal or new.nominal:
        return []
    facts = facts_beside(fitted_identity(old.fit), fitted_identity(new.fit))
    return [fact for fact in facts if fact.name in SYSTEM and fact.agreement == "differs"]


class HardwareProfile(Record, frozen=True, tag_field="schema", tag="latfit.hardware/1"):
    what: ClassVar[str] = "hardware profile"
    made_by: ClassVar[str] = "latfit fit TRACE"

    paths: Mapping[str, ExecutionPath] = {}

    def with_path(self, path: ExecutionPath, *, force: bool = False) -> "HardwareProfile":
        """Return a profile with `path` in place of any older one. Raises WrongUsage if that takes force.

        The older ceiling and price stay where the new path has none, unless they are of another system.
        """
        if path.name in self.paths:
            old = self.paths[path.name]
            if not force and (refused := refusal(old, path)):
                raise WrongUsage(refused.message, remedy=refused.remedy)
            if not differing_facts(old, path):
                price = old.price_per_hour if path.price_per_hour is None else path.price_per_hour
                path = replace(path, ceiling=old.ceiling.updated(path.ceiling), price_per_hour=price)
        return HardwareProfile({**self.paths, path.name: path})

    def without(self, name: str) -> "HardwareProfile":
        remedy = f"There are: {', '.join(self.paths)}." if self.paths else "The profile holds no path."
        refuse(name not in self.paths, f"no path {name!r}", "PATH", remedy)
        return HardwareProfile({known: path for known, path in self.paths.items() if known != name})

    def first_of(self, names: tuple[str, ...]) -> ExecutionPath | None:
        return next((self.paths[name] for name in names if name in self.paths), None)

    @property
    def engine_path(self) -> ExecutionPath | None:
        """The path of a serving engine: gpu, or the only one."""
        only = next(iter(self.paths.values())) if len(self.paths) == 1 else None
        return self.paths.get("gpu", only)

    def __repr__(self) -> str:
        return f"<HardwareProfile {', '.join(path.label for path in self.paths.values()) or 'without paths'}>"

    def to_json(self) -> dict[str, Any]:
        paths = {name: path.to_json() for name, path in self.paths.items()}
        return {**to_builtins(HardwareProfile()), "paths": paths}

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        entries = document["paths"].items()
        paths = {name: ExecutionPath.from_json({**each, "name": name}, f"path {name!r}") for name, each in entries}
        return {**document, "paths": paths}


@dataclass(frozen=True)
class Entered:
    """A profile with new paths: what they replaced, and why others were refused, by name."""

    profile: HardwareProfile
    replaced: tuple[str, ...] = ()
    refused: Mapping[str, Message] = field(default_factory=dict)


def add_path(target: Path, *paths: ExecutionPath, force: bool = False) -> Entered:
    """Enter paths into the profile at `target`, which is made if missing; several processes may do so at once.

    Paths that only force may replace stay.
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
        return dumps(change(HardwareProfile.read(target) if target.exists() else HardwareProfile()).to_json()) + "\n"

    rewrite(target, content)
