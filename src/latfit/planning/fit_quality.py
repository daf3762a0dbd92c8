"""What a decision rests on: the fits of its step times, how far off they are, and what system they are of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latfit.hardware import ExecutionPath
from latfit.model import FitResult, fitted_identity


@dataclass(frozen=True)
class FitQuality:
    """How good the step costs of a plan are. error_pct: on unseen steps, mean, None where nothing was measured;
    by_phase: of each phase.  path: the execution path that they are of, where a plan knows several.  system: what the
    fit's trace says of hardware, model and engine."""

    name: str
    model: str
    error_pct: float | None
    by_phase: Mapping[str, float]
    path: str = ""
    system: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst_pct(self) -> float:
        """Of the phases; 0 where nothing is known."""
        return max([*self.by_phase.values(), self.error_pct or 0.0])

    def to_json(self) -> dict[str, Any]:
        return {
            "fit": self.name,
            "model": self.model,
            "error_pct": self.error_pct,
            "error_pct_by_phase": dict(self.by_phase),
            "path": self.path or self.system.get("path"),
            "system": dict(self.system),
        }


def quality_of(name: str, fit: FitResult, path: str = "") -> FitQuality:
    """The cross-validated error of a fit."""
    errors = fit.cross_validation.errors
    by_phase = dict(errors.by_phase) if errors and errors.by_phase else {}
    return FitQuality(name, fit.name, fit.cross_validation.mape_pct, by_phase, path, fitted_identity(fit))


def quality_of_path(path: ExecutionPath) -> FitQuality:
    """Of a path of a hardware profile, by the name of its trace; nominal numbers have no error that anybody knows."""
    if path.nominal is not None:
        return FitQuality(path.nominal.text, "nominal", None, {}, path.name)
    return quality_of(trace_name(path.fit), path.fit, path.name)


def trace_name(fit: FitResult) -> str:
    """Name the file that a fit was made from, without its folder, and how many more there were."""
    names = fit.data.sources or (fit.data.source or "fit").split(", ")
    first = Path(names[0]).name
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
