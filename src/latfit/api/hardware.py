"""Machines: execution paths by name, from fits or nominal numbers."""

from collections.abc import Callable, Mapping
from copy import copy
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from latfit import hardware, reporting
from latfit.api.answer import data_frame
from latfit.api.fits import Fit, as_fit, names_a_fit
from latfit.api.request import ignored
from latfit.errors import BadInput, WrongUsage
from latfit.model import FitResult, fitted_identity

Numbers = Fit | FitResult | hardware.ExecutionPath | str | Path
"""What stands for a path: a fit, its file, or nominal numbers such as "launch=12ms,slope=0.05ms"."""

Change = Callable[[hardware.HardwareProfile], hardware.HardwareProfile]

DEFAULT_PATH = "gpu"


class Hardware:
    """A machine: its execution paths by name, each measured (a fit) or given by nominal numbers.

    Made from {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}, a `hardware.json`, or a fit alone. result: the record.
    replaced: what `add` replaced, in sentences. Raises BadInput, FitNotUsable, WrongUsage.
    """

    def __init__(self, paths: Any = MappingProxyType({})) -> None:
        self.result = self._read = profile_of(paths)
        self.replaced: tuple[str, ...] = ()
        self._source = Path(paths) if isinstance(paths, str | Path) and not _is_one_fit(paths) else None
        self._changes: tuple[Change, ...] = ()

    def add(
        self,
        name: str,
        numbers: Numbers | None = None,
        *,
        nominal: str | None = None,
        flops: float | None = None,
        bandwidth: float | None = None,
        flops_per_token: float | None = None,
        step_bytes: float | None = None,
        price: float | None = None,
        force: bool = False,
    ) -> "Hardware":
        """Return the machine with a path entered, or with more known of one that is there.

        numbers: a fit or its file. nominal: "p50=2ms", "launch=0.5ms,slope=0.02ms". flops, bandwidth (bytes/s),
        flops_per_token, step_bytes: the machine's limits. price: per hour. force: replace a measured path by nominal
        numbers or by the fit of another system too. Raises BadInput, WrongUsage.
        """
        if not name.strip():
            raise WrongUsage("a path without a name", where="PATH", remedy="Name it: amx, gpu, cpu, ...")
        if price is not None and not 0 <= price < float("inf"):
            raise WrongUsage(f"a price of {price:g}", where="--price", remedy="Give 0 or more an hour.")
        facts: Any = {
            "ceiling": hardware.Ceiling(flops, bandwidth, flops_per_token, step_bytes),
            "price_per_hour": price,
        }
        old = self.result.paths.get(name)
        if nominal is not None:
            if numbers is not None:
                remedy = "Give one of them."
                raise WrongUsage("a fit and nominal numbers contradict each other", where="--nominal", remedy=remedy)
            new = hardware.nominal_path(name, hardware.parse_nominal(nominal))
        elif numbers is not None:
            new = path_of(name, numbers)
        elif old is None:
            remedy = 'Name its .fit.json, or give --nominal "p50=2ms".'
            raise WrongUsage(f"nothing to enter for path {name}", where="FIT", remedy=remedy)
        else:
            return self._changed(lambda profile: profile.with_path(replace(profile.paths.get(name, old), **facts)))
        path = replace(new, **facts)
        replaced = hardware.replacement(old, path) if old is not None else ""
        return self._changed(lambda profile: profile.with_path(path, force=force), replaced)

    def remove(self, name: str) -> "Hardware":
        return self._changed(lambda profile: profile.without(name))

    def _changed(self, change: Change, replaced: str = "") -> "Hardware":
        """Return the machine after a change, which `save` repeats on the file."""
        found = copy(self)
        found.result = change(self.result)
        found.replaced += (replaced,) if replaced else ()
        found._changes += (change,)
        return found

    @property
    def paths(self) -> Any:
        """DataFrame: a row a path."""
        rows = []
        for path in self.result.paths.values():
            ends = {f"{name}_{end}": path.fit.domain[name][i] for name in "BS" for i, end in enumerate(("min", "max"))}
            about: dict[str, Any] = {"path": path.name, "source": path.source, "model": path.fit.name}
            rows.append(about | ends | {"price_per_hour": path.price_per_hour})
        return data_frame(rows)

    def described(self, tokens_per_request: int = 1, context: float | None = None) -> dict[str, Any]:
        note_unread_context(self.result, context)
        paths = self.result.paths.items()
        return {name: reporting.steps.path_facts(path, tokens_per_request, context) for name, path in paths}

    def outside(self, tokens_per_request: int = 1, context: float | None = None) -> list[str]:
        found = [hardware.PathLatency(path, tokens_per_request, context).outside for path in self.result.paths.values()]
        return [text for text in found if text]

    def save(self, target: str | Path = "hardware.json", *, force: bool = False) -> None:
        """Enter the paths into the profile at `target`, made if missing; its other paths stay.

        Of a machine that was read from `target` only the changes since are entered. force: as of `add`. Raises
        TargetNotWritable, WrongUsage, BadInput.
        """
        place = Path(target)
        is_source = self._source is not None and place.exists() and place.samefile(self._source)

        def change(profile: hardware.HardwareProfile) -> hardware.HardwareProfile:
            for path in () if is_source else self._read.paths.values():
                profile = profile.with_path(path, force=force)
            return reduce(lambda found, step: step(found), self._changes, profile)

        hardware.change_hardware(place, change)
        self._changes = () if is_source else self._changes

    def to_json(self) -> dict[str, Any]:
        return self.result.to_json()

    @classmethod
    def from_json(cls, document: Any) -> "Hardware":
        return cls(hardware.HardwareProfile.from_json(document))

    def __repr__(self) -> str:
        paths = [f"{path.name}: {path.source}" for path in self.result.paths.values()]
        return f"Hardware({'; '.join(paths) or 'no path'})"


def check_one_model(profile: hardware.HardwareProfile) -> None:
    """Raise FitNotUsable if the paths serve different LLMs."""
    if len(profile.paths) > 1:
        from latfit.fitting import check_alike

        check_alike({f"path {name}": path.fit for name, path in profile.paths.items()})


def note_unread_context(profile: hardware.HardwareProfile, context: float | None) -> None:
    if context is not None and not any(path.fit.reads_context for path in profile.paths.values()):
        ignored("--context", "no path's latency depends on cached tokens")


def profile_of(paths: Any) -> hardware.HardwareProfile:
    """Return the profile that `paths` describes or names: see `Hardware`."""
    if isinstance(paths, Hardware):
        return paths.result
    if isinstance(paths, hardware.HardwareProfile):
        return paths
    if isinstance(paths, Mapping):
        return hardware.HardwareProfile({str(name): path_of(str(name), each) for name, each in paths.items()})
    if isinstance(paths, hardware.ExecutionPath):
        return hardware.HardwareProfile({paths.name: paths})
    if isinstance(paths, Fit | FitResult) or _is_one_fit(paths):
        fit = as_fit(paths)
        name = fit.path or fitted_identity(fit.result).get("path") or DEFAULT_PATH
        return hardware.HardwareProfile({name: path_of(name, fit)})
    nameless = isinstance(paths, str) and "=" in paths and not Path(paths).exists()
    if nameless or not isinstance(paths, str | Path):
        found = "nominal numbers of a path without a name" if nameless else f"{type(paths).__name__} is no machine"
        remedy = 'Give a fit, a hardware.json, or {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}.'
        raise WrongUsage(found, where="paths", remedy=remedy)
    return hardware.HardwareProfile.read(Path(paths))


def path_of(name: str, numbers: Numbers) -> hardware.ExecutionPath:
    if isinstance(numbers, hardware.ExecutionPath):
        return replace(numbers, name=name)
    if isinstance(numbers, str) and not names_a_fit(numbers):
        return hardware.nominal_path(name, hardware.parse_nominal(numbers, where=f"path {name}"))
    if isinstance(numbers, Fit | FitResult | str | Path):
        return hardware.ExecutionPath(name, as_fit(numbers).result)
    raise BadInput(
        f"{type(numbers).__name__} is neither a fit nor nominal numbers",
        where=f"path {name}",
        remedy='Give a fit, its .fit.json, or numbers such as "launch=12ms,slope=0.05ms".',
    )


def _is_one_fit(paths: Any) -> bool:
    return names_a_fit(paths) and (str(paths).endswith(".fit.json") or not str(paths).endswith(".json"))
