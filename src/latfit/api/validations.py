"""`validate`: a measured serving run beside its simulation."""

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from latfit.api.engines import OF_SETTINGS, check_one_engine, engine_settings_of
from latfit.api.fits import as_fit
from latfit.api.loads import recording_of
from latfit.api.quantities import library_verb, only_with
from latfit.api.simulations import State
from latfit.errors import FitNotUsable, WrongUsage
from latfit.simulation import step_costs
from latfit.validation import (
    Validation as Comparison,
    as_measured,
    cautions_about,
    not_of_machine,
    validate as compared,
)
from latfit.warning import LatfitWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from latfit.reporting import Table


@dataclass(frozen=True, repr=False, eq=False)
class Validation:
    """Measured against simulated TTFT, TPOT and latency. result: the record (`latfit.validation.Validation`).  foreign:
    why the run is not of the machine that the fit is of, empty where it may be."""

    result: Comparison
    warnings: Sequence[LatfitWarning] = ()
    foreign: str = ""

    def check_machine(self) -> None:
        """Raises FitNotUsable where the run is not of the machine that the fit is of."""
        if self.foreign:
            raise FitNotUsable(
                "the fit is not of the machine that this run was measured on",
                where=self.result.measured.source,
                remedy="Check the engine's limits, fit the machine's own steps; --force compares all the same.",
            )

    @property
    def agrees(self) -> bool:
        """Whether every mean is within 2 %, every p90 and p99 within 4 % of what was measured."""
        return self.result.agrees

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        return " ".join(filter(None, (self.foreign, self.result.verdict)))

    @property
    def state(self) -> State:
        """Whether the verdict is good or bad."""
        return "good" if self.agrees else "bad"

    @property
    def frame(self) -> "DataFrame":
        """A DataFrame, one row a statistic of a metric: measured_ms, simulated_ms, error_pct, limit_pct, holds."""
        import pandas as pd

        rows = [
            {
                "metric": each.metric.removesuffix("_ms"),
                "statistic": each.statistic,
                "measured_ms": each.measured,
                "simulated_ms": each.simulated,
                "error_pct": each.error_pct,
                "limit_pct": each.limit_pct,
                "holds": each.holds,
            }
            for each in self.result.figures
        ]
        return pd.DataFrame(rows)

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """The comparison as tables of text; brief: means and errors of the three judged metrics."""
        from latfit.reporting import brief_validation_table, validation_table

        return [brief_validation_table(self.result) if brief else validation_table(self.result)]

    def plot(self) -> "Figure":
        """A matplotlib figure: the distribution of each metric, measured and simulated."""
        from latfit.reporting import validation_figure

        return validation_figure(self.result)

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit validate --json`."""
        machine = {"foreign": bool(self.foreign), "verdict": self.verdict}
        return self.result.to_json() | machine | {"warnings": [asdict(each) for each in self.warnings]}

    def summary(self) -> str:
        """The verdict, the three metrics and the warnings, as the command prints them."""
        from latfit.reporting import table_text

        shown = [f"  ! {each.message}. {each.remedy}" for each in self.warnings]
        return "\n".join([self.verdict, *map(table_text, self.tables(brief=True)), *shown])

    def __repr__(self) -> str:
        return f"Validation: {self.verdict}"

    def _repr_html_(self) -> str:
        from latfit.reporting import table_html

        return f"<p><b>{html.escape(self.verdict)}</b></p>" + "".join(map(table_html, self.tables(brief=True)))


@library_verb
@only_with(*OF_SETTINGS)
def validate(
    fit: Any,
    run: Any,
    *,
    kv_blocks: int | None = None,
    prefill_fit: Any = None,
    calibrate: bool = False,
    batching: str | Sequence[str] = "chunked-prefill",
    seed: int = 0,
    force: bool = False,
    **engine: Any,
) -> Validation:
    """Simulate a measured serving run and compare TTFT, TPOT and latency with what was measured.

    fit: step costs, a Fit or a `.fit.json` file; prefill_fit: of steps that contain prefill, where they are fitted
    separately.  run: recorded requests with the times of their first and last tokens, a file or a table.  calibrate:
    fit a constant a step and one a token on the first third, and score the rest.  engine: further settings, see
    `engine_settings`.  force: take fits that are of different machines or models together. Whether the run is of the
    fits' machine is told first (`.foreign`). Raises WrongUsage, BadInput, FitNotUsable.
    """
    setup = engine_settings_of([fit], kv_blocks=kv_blocks, batching=batching, **engine)
    settings, *others = setup.settings
    if others:
        raise WrongUsage("one engine was measured", where="--batching", remedy="Give one.")
    if not force:
        check_one_engine(fit, prefill_fit)
    fits = as_fit(fit).result, None if prefill_fit is None else as_fit(prefill_fit).result
    measured = as_measured(recording_of(run))
    found = compared(measured, step_costs(*fits), settings, calibration=calibrate, seed=seed)
    left_out = [LatfitWarning("left_out", note, "Correct these rows, or leave them out.") for note in measured.notes]
    foreign = not_of_machine([each for each in fits if each is not None], found)
    return Validation(found, [*left_out, *cautions_about(*fits, found.run, settings)], foreign)
