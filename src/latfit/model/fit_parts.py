"""The parts of a fit's record, each with the keys that it has in a file.

`to_json` and `from_json` are inverse to each other: what a file leaves out is None or empty here and is left out again,
and a number that JSON cannot hold (an infinite condition number, R2 of times that do not vary) is null in the file and
NaN here. Results of statistical tests are kept as they were written: whoever shows them shows what there is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from latfit.units import format_percent

JsonObject = Mapping[str, Any]


def _known(kind: Any, document: JsonObject) -> dict[str, Any]:
    """The entries that a record has fields for."""
    return {each.name: document[each.name] for each in fields(kind) if each.name in document}


def _number(found: Any) -> Any:
    return math.nan if found is None else found


@dataclass(frozen=True)
class Errors:
    """Errors of predicted times over n steps (see `stats.error_metrics`): in ms, in percent of what was observed."""

    n: int | None = None
    r2: float | None = None
    rmse_ms: float | None = None
    mae_ms: float | None = None
    mape_pct: float | None = None
    median_ape_pct: float | None = None
    p90_ape_pct: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {each.name: value for each in fields(Errors) if (value := getattr(self, each.name)) is not None}

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        return cls(**{name: _number(value) for name, value in _known(Errors, document).items()})


@dataclass(frozen=True)
class HeldOutErrors:
    """Errors on rows left out: over all of them, by fold (K,), and mean and spread over the folds.

    regions: error by the region left out.  by_phase: error of each phase with rows enough to count.  trained_up_to_S,
    trained_up_to_B: the most tokens, or requests, of a step that trained.  distance: the median of how far the steps
    lie outside the support of those that trained (see `model.support`); where folds are such.
    """

    folds: int
    mape_pct: float
    median_ape_pct: float
    p90_ape_pct: float
    rmse_ms: float
    mape_pct_by_fold: Sequence[float]
    mape_pct_mean: float
    mape_pct_sd: float | None
    regions: Mapping[str, float] | None = None
    by_phase: Mapping[str, float] | None = None
    trained_up_to_S: float | None = None  # noqa: N815 - a key of the file
    trained_up_to_B: float | None = None  # noqa: N815 - a key of the file
    trained_up_to_context: float | None = None
    distance: float | None = None

    def to_json(self) -> dict[str, Any]:
        kinds = ("regions", "by_phase", "trained_up_to_S", "trained_up_to_B", "trained_up_to_context", "distance")
        return {name: value for name, value in asdict(self).items() if name not in kinds or value is not None}

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        return cls(**_known(cls, document))


@dataclass(frozen=True, repr=False)
class CrossValidation:
    """Errors on rows left out by the default scheme, and what harder ones say: later rows, a part of the plane of B and
    S, more tokens, more requests, steps unlike those that trained. selection: how the model was chosen, of `--model
    auto`. None where the rows cannot answer."""

    scheme: str | None = None
    errors: HeldOutErrors | None = None
    expanding_window: HeldOutErrors | None = None
    by_region: HeldOutErrors | None = None
    extrapolation_S: HeldOutErrors | None = None  # noqa: N815 - a key of the file
    extrapolation_B: HeldOutErrors | None = None  # noqa: N815 - a key of the file
    extrapolation_context: HeldOutErrors | None = None
    outside_support: HeldOutErrors | None = None
    selection: JsonObject | None = None

    def __repr__(self) -> str:
        return f"CrossValidation({self.scheme}, MAPE {format_percent(self.mape_pct)})"

    @property
    def mape_pct(self) -> float | None:
        """Mean error in percent by the default scheme."""
        return self.errors.mape_pct if self.errors else None

    def to_json(self) -> dict[str, Any]:
        further = {name: getattr(self, name) for name in _FURTHER}
        return {
            **({"scheme": self.scheme} if self.scheme else {}),
            **(self.errors.to_json() if self.errors else {}),
            **{name: errors.to_json() for name, errors in further.items() if errors is not None},
            **({"selection": dict(self.selection)} if self.selection else {}),
        }

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        return cls(
            document.get("scheme"),
            HeldOutErrors.from_json(document) if "folds" in document else None,
            **{name: HeldOutErrors.from_json(document[name]) for name in _FURTHER if name in document},
            selection=document.get("selection"),
        )


_FURTHER = (
    "expanding_window",
    "by_region",
    "extrapolation_S",
    "extrapolation_B",
    "extrapolation_context",
    "outside_support",
)


@dataclass(frozen=True)
class Baseline(Errors):
    """Errors of a plain model, and those on rows left out."""

    cv: CrossValidation = field(default_factory=CrossValidation)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "cv": self.cv.to_json()}

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        errors = Errors.from_json(document)
        return cls(**vars(errors), cv=CrossValidation.from_json(document.get("cv", {})))


@dataclass(frozen=True)
class Combination:
    """An expression in parameters with its value and 95 % interval, and the unit."""

    expression: str
    value: float
    low: float
    high: float
    unit: str


@dataclass(frozen=True)
class Measurement:
    """A region of B and S to measure, and the largest relative standard error of `parameters` before and after."""

    parameters: tuple[str, ...]
    B: tuple[float, float]
    S: tuple[float, float]
    before: float
    after: float
    text: str

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "parameters": list(self.parameters), "B": list(self.B), "S": list(self.S)}


@dataclass(frozen=True)
class Identifiability:
    """What the data tell of the parameters: groups that they cannot tell apart, what is known of these together, and
    what to measure.

    prefill: whether the data say anything of steps that hold some.  singular_values: of the scaled Jacobian (p,).
    line_as_good: whether a linear baseline predicts rows left out as well.
    """

    condition_number: float | None = None
    unidentified: Sequence[Sequence[str]] = ()
    prefill: bool = True
    combinations: Sequence[Combination] = ()
    measure: Sequence[Measurement] = ()
    condition_number_log: float | None = None
    singular_values: Sequence[float] | None = None
    line_as_good: bool = False

    def to_json(self) -> dict[str, Any]:
        if self.condition_number is None:
            return {}
        told = {"condition_number_log": self.condition_number_log, "singular_values": self.singular_values}
        return {
            "condition_number": self.condition_number,
            "unidentified": [list(group) for group in self.unidentified],
            "prefill": self.prefill,
            **{name: value for name, value in told.items() if value is not None},
            "combinations": [asdict(combination) for combination in self.combinations],
            "measure": [wanted.to_json() for wanted in self.measure],
            **({"line_as_good": True} if self.line_as_good else {}),
        }

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        numbers = ("condition_number", "condition_number_log")
        known = {name: _number(document[name]) for name in numbers if name in document}
        plain = ("unidentified", "prefill", "singular_values", "line_as_good")
        return cls(
            **known,
            **{name: document[name] for name in plain if name in document},
            combinations=[Combination(**each) for each in document.get("combinations", [])],
            measure=[
                Measurement(**{**each, **{name: tuple(each[name]) for name in ("parameters", "B", "S")}})
                for each in document.get("measure", [])
            ],
        )


@dataclass(frozen=True)
class LevelChange:
    """A run whose level changes: when (t_s in seconds, or the row where there are no times), by how much of a step's
    time, and how likely that is by chance."""

    relative_shift: float
    p_value: float
    t_s: float | None = None
    row: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Drift:
    """Runs whose level changes, by name, and the share of the residuals' variance that is due to it. reason: why
    nothing was tested."""

    runs: Mapping[str, LevelChange] = field(default_factory=dict)
    runs_tested: int = 0
    variance_share: float = 0.0
    test: str = ""
    sentence: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.reason:
            return {"reason": self.reason}
        found = {name: getattr(self, name) for name in ("test", "runs_tested", "variance_share", "sentence")}
        return {**found, "runs": {name: change.to_json() for name, change in self.runs.items()}}

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        runs = {name: LevelChange(**_known(LevelChange, change)) for name, change in document.get("runs", {}).items()}
        return cls(**{**_known(cls, document), "runs": runs})


_TESTS = (
    "normality",
    "heteroscedasticity",
    "autocorrelation",
    "trend",
    "lack_of_fit",
    "influence",
    "contradictions",
    "error_parts",
)


@dataclass(frozen=True, repr=False)
class Diagnostics:
    """What the residuals say: tests with their numbers or the reason why there are none, errors by phase (`regimes`),
    runs that drift, cells that the fit hangs on, steps that contradict those beside them, and what the errors on rows
    left out consist of. None where nobody looked, or nothing was found."""

    normality: JsonObject | None = None
    heteroscedasticity: JsonObject | None = None
    autocorrelation: JsonObject | None = None
    trend: JsonObject | None = None
    regimes: Mapping[str, Errors] | None = None
    lack_of_fit: JsonObject | None = None
    influence: JsonObject | None = None
    contradictions: JsonObject | None = None
    drift: Drift | None = None
    error_parts: JsonObject | None = None

    def __repr__(self) -> str:
        return f"Diagnostics of {', '.join(name for name, found in vars(self).items() if found is not None)}"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: test for name in _TESTS if (test := getattr(self, name)) is not None}
        if self.regimes is not None:
            found["regimes"] = {phase: errors.to_json() for phase, errors in self.regimes.items()}
        if self.drift is not None:
            found["drift"] = self.drift.to_json()
        return found

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        regimes, drift = document.get("regimes"), document.get("drift")
        return cls(
            **{name: document[name] for name in _TESTS if name in document},
            regimes=None if regimes is None else {name: Errors.from_json(each) for name, each in regimes.items()},
            drift=None if drift is None else Drift.from_json(drift),
        )


@dataclass(frozen=True)
class DataFacts:
    """Where the rows of a fit come from and how they were read (see `trace.data_facts`). nominal: the numbers given
    for a path that nobody measured.  more: other facts by name."""

    source: str | None = None
    sources: Sequence[str] | None = None
    sha256: str | None = None
    rows_read: int | None = None
    rows_used: int | None = None
    dropped: Mapping[str, int] | None = None
    nominal: str | None = None
    more: JsonObject = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "more" and value is not None}
        return {**own, **self.more}

    @classmethod
    def from_json(cls, document: JsonObject) -> Self:
        own = {each.name for each in fields(cls)} - {"more"}
        known = {name: value for name, value in document.items() if name in own and value is not None}
        return cls(**known, more={name: value for name, value in document.items() if name not in known})
