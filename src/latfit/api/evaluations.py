"""How well a fit predicts steps that it has not seen, and whether they are of its machine at all."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from latfit.errors import FitNotUsable
from latfit.units import format_percent

if TYPE_CHECKING:
    from latfit.fitting import MachineCheck

MUCH_WORSE = 1.5
"""Times the cross-validated error from which an error on other steps puts a fit in doubt."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Errors of a fit on a trace.

    scores: the contract of `latfit evaluate --json`.  data: what was read and dropped.  held_out_pct: the fit's own
    cross-validated error, in percent.  machine: whether the steps are of the machine that the fit is of.
    """

    scores: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    held_out_pct: float | None = None
    machine: "MachineCheck | None" = None

    @property
    def foreign(self) -> bool:
        """Whether the steps are not of the machine that the fit is of, so that their errors say nothing of the fit."""
        return bool(self.scores.get("machine", {}).get("state") == "other")

    @property
    def state(self) -> Literal["good", "doubt", "bad"]:
        """bad: steps of another machine.  doubt: where that cannot be told or steps have shifted, or the error is far
        above that of the fit's cross-validation."""
        if self.foreign:
            return "bad"
        found, own = self.scores["metrics"]["mape_pct"], self.held_out_pct
        sure = self.scores.get("machine", {}).get("state", "same") == "same"
        return "good" if sure and (own is None or found <= MUCH_WORSE * own) else "doubt"

    @property
    def verdict(self) -> str:
        """Whether the steps are of the fitted machine, where that is not so or not sure; their errors beside the fit's
        own."""
        told = self.scores.get("machine", {})
        return " ".join([*([told["verdict"]] if told.get("state", "same") != "same" else []), self.errors_line])

    def check_machine(self) -> None:
        """Raises FitNotUsable where the steps are not of the machine that the fit is of."""
        if self.foreign:
            raise FitNotUsable(
                "the fit is not of the machine that these steps were measured on",
                where=str(self.data.get("source") or "steps"),
                remedy="Fit the machine's own steps with `latfit fit`; --force scores these all the same.",
            )

    @property
    def errors_line(self) -> str:
        """Errors on these steps beside the fit's own, in a sentence."""
        found = self.scores["metrics"]
        known = self.held_out_pct
        own = "" if known is None else f" (cross-validated when fitted: {format_percent(known)})"
        return (
            f"Median error {format_percent(found['median_ape_pct'])} (n = {found['n']:,})."
            f" MAPE {format_percent(found['mape_pct'])}{own}."
        )

    @property
    def coverage_line(self) -> str:
        """How many steps lie in the fit's intervals, in a sentence; empty where it has none."""
        shares = [
            f"{format_percent(100 * share)} in the {format_percent(100 * float(level))} interval"
            for level, share in self.scores["interval_coverage"].items()
        ]
        outside = f"{self.scores['outside_domain']:,} steps outside the measured range"
        return f"Coverage: {', '.join([*shares, outside])}."

    @property
    def phase_line(self) -> str:
        """The median error of each phase, in a sentence; empty where there is one phase."""
        phases = self.scores["by_phase"]
        shown = [f"{phase} {format_percent(found['median_ape_pct'])}" for phase, found in phases.items()]
        return f"Median error by phase: {', '.join(shown)}." if len(shown) > 1 else ""

    @property
    def table(self) -> Any:
        """DataFrame: errors over all steps and by phase, in percent and ms."""
        import pandas as pd

        rows = {"all": self.scores["metrics"], **self.scores["by_phase"]}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("phase")

    def summary(self) -> str:
        """What `latfit evaluate` prints."""
        return "\n".join(filter(None, [self.verdict, self.coverage_line, self.phase_line, *self.scores["notes"]]))

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit evaluate --json`."""
        return dict(self.scores)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Evaluation":
        return cls(document)

    def __repr__(self) -> str:
        return f"Evaluation: {self.verdict}"

    def _repr_html_(self) -> str:
        from latfit.reporting import evaluation_table, table_html

        return f"<p>{html.escape(repr(self))}</p>{table_html(evaluation_table(self.scores))}"
