"""The fits that a decision rests on: their errors and the system that they are of."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import field

from latfit.catalogue import PREFIX
from latfit.hardware import ExecutionPath, path_label
from latfit.model import FitResult, fitted_identity
from latfit.records import Record
from latfit.units import format_percent

NOMINAL = "nominal"


class FitQuality(Record, frozen=True):
    """Step costs of a plan. error_pct: mean on unseen steps, of the catalogue assumed; None: not measured."""

    name: str = field(name="fit")
    model: str
    error_pct: float | None
    by_phase: Mapping[str, float] = field(name="error_pct_by_phase", default_factory=dict)
    path: str | None = None
    system: Mapping[str, str] = {}

    @property
    def worst_pct(self) -> float:
        return max([*self.by_phase.values(), self.error_pct or 0.0])

    @property
    def label(self) -> str | None:
        return self.path and path_label(self.path, nominal=self.model == NOMINAL)

    @property
    def error(self) -> str:
        """`12 % off on unseen steps (decode 5 %)`."""
        if self.error_pct is None:
            return "error on unseen steps unknown"
        if self.name.startswith(PREFIX):
            return f"{format_percent(self.error_pct)} off assumed, not measured on this machine"
        phases = ", ".join(f"{name} {format_percent(each)}" for name, each in self.by_phase.items())
        return f"{format_percent(self.error_pct)} off on unseen steps{f' ({phases})' if phases else ''}"


def quality_of(name: str, fit: FitResult, path: str = "") -> FitQuality:
    errors = fit.cross_validation.errors
    by_phase = dict(errors.by_phase) if errors and errors.by_phase else {}
    system = dict(fitted_identity(fit))
    return FitQuality(name, fit.name, fit.cross_validation.mape_pct, by_phase, path or system.get("path"), system)


def quality_of_path(path: ExecutionPath) -> FitQuality:
    if path.nominal is not None:
        return FitQuality(path.nominal.text, NOMINAL, None, {}, path.name)
    return quality_of(trace_name(path.fit), path.fit, path.name)


def trace_name(fit: FitResult) -> str:
    """Return the name of a fit's file, and how many more there are."""
    names = fit.data.sources or (fit.data.source or "fit").split(", ")
    first = names[0] if names[0].startswith(PREFIX) else Path(names[0]).name
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
