"""Parts of a fit's record, each its own JSON (see `latfit.records`): field names are the keys of the file."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from latfit.records import Number, OpenRecord, Record

JsonObject = Mapping[str, Any]


class Estimate(Record, frozen=True):
    """A parameter with its 95 % interval [low, high]; None where the data do not give an end."""

    value: Number
    std_error: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    identified: bool = True
    fixed: bool = False


class Errors(Record, frozen=True, omit_defaults=True):
    """Errors of predicted times over n steps, in ms and in percent of the observed time: see `stats.error_metrics`."""

    n: int | float | None = None
    r2: float | None = None
    rmse_ms: float | None = None
    mae_ms: float | None = None
    mape_pct: float | None = None
    median_ape_pct: float | None = None
    p90_ape_pct: float | None = None


class HeldOutErrors(Record, frozen=True, omit_defaults=True):
    """Errors on held-out rows, by fold (K,), and mean and standard deviation over the folds."""

    folds: int
    mape_pct: float
    median_ape_pct: float
    p90_ape_pct: float
    rmse_ms: float
    mape_pct_by_fold: Sequence[float]
    mape_pct_mean: float
    mape_pct_sd: float | None
    regions: Mapping[str, float] | None = None  # mean error in percent by the region held out
    by_phase: Mapping[str, float] | None = None  # mean error in percent
    # largest value of the training rows, where larger ones were held out
    trained_up_to_S: float | None = None  # noqa: N815 - a key of the file
    trained_up_to_B: float | None = None  # noqa: N815 - a key of the file
    trained_up_to_context: float | None = None
    distance: float | None = None  # median, of the held-out steps from the support of the training rows

    @property
    def trained_up_to(self) -> float | None:
        return self.trained_up_to_S or self.trained_up_to_B or self.trained_up_to_context


class CrossValidation(Record, frozen=True, omit_defaults=True):
    """Held-out errors of the default scheme and of harder ones; None where the rows do not suffice."""

    scheme: str | None = None
    errors: HeldOutErrors | None = None
    expanding_window: HeldOutErrors | None = None
    by_region: HeldOutErrors | None = None
    extrapolation_S: HeldOutErrors | None = None  # noqa: N815 - a key of the file
    extrapolation_B: HeldOutErrors | None = None  # noqa: N815 - a key of the file
    extrapolation_context: HeldOutErrors | None = None
    outside_support: HeldOutErrors | None = None
    selection: JsonObject | None = None

    @property
    def mape_pct(self) -> float | None:
        return self.errors.mape_pct if self.errors else None


class Baseline(Errors, frozen=True, omit_defaults=True):
    """Errors of a baseline model, in sample and held out."""

    cv: CrossValidation = msgspec.field(default_factory=CrossValidation)


class Identifiability(Record, frozen=True):
    condition_number: Number | None = None
    unidentified: Sequence[Sequence[str]] = ()  # groups of parameters that are not determined separately
    prefill: bool = True  # whether the data hold steps with prefill
    singular_values: Sequence[float] | None = None  # of the scaled Jacobian (p,)
    line_as_good: bool = False  # whether the linear baseline predicts held-out rows as well


class LevelChange(Record, frozen=True, omit_defaults=True):
    """A change of level within a run: relative size, p-value, and when (t_s in seconds)."""

    relative_shift: float
    p_value: float
    t_s: float | None = None


class Drift(Record, frozen=True):
    """Runs whose level changes, and their share of the residuals' variance; reason: why nothing was tested."""

    runs: Mapping[str, LevelChange] = msgspec.field(default_factory=dict)
    runs_tested: int = 0
    variance_share: float = 0.0
    test: str = ""
    sentence: str = ""
    reason: str = ""


class Cliff(Record, frozen=True):
    axis: str  # B of decode steps, or S of steps with prefill
    size: int
    above: int  # the next measured size
    step_pct: float  # by how much T rises beyond smooth growth, with its 95 % interval
    interval_pct: tuple[float, float]
    cost_pct: float  # throughput lost at size + 1, compared with size


class Cliffs(Record, frozen=True):
    """Cliffs that were found. tested: boundaries between neighbouring sizes. level: probability of any false cliff."""

    found: Sequence[Cliff] = ()
    tested: int = 0
    level: float = 0.05


class Diagnostics(Record, frozen=True, omit_defaults=True):
    """What residuals show; a part that could not be computed holds a `reason`, one not looked for is None."""

    regimes: Mapping[str, Errors] | None = None
    lack_of_fit: JsonObject | None = None
    contradictions: JsonObject | None = None
    drift: Drift | None = None
    error_parts: JsonObject | None = None
    cliffs: Cliffs | None = None


class DataFacts(OpenRecord, frozen=True):
    source: str | None = None
    sources: Sequence[str] | None = None
    sha256: str | None = None
    rows_read: int | None = None
    rows_used: int | None = None
    dropped: Mapping[str, int] | None = None
    nominal: str | None = None
