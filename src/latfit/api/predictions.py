"""The steps that a prediction is asked for, what a fit says of them, as a DataFrame, and how well it predicts steps
that it has not seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.api.answer import Answer, State
from latfit.api.reading import data_line, steps_of
from latfit.api.request import ignored
from latfit.errors import BadInput, FitNotUsable, WrongUsage
from latfit.fitting import predict
from latfit.messages import Message, note
from latfit.model import CONTEXT, SOURCES, FitResult, with_typical_context
from latfit.stats import FloatArray
from latfit.trace import COMPUTE, PERIOD, Trace, impossible_steps
from latfit.units import format_percent

if TYPE_CHECKING:
    from latfit.fitting import MachineCheck
    from latfit.reporting import Table

FEW = 8
"""Numbers that an error repeats."""
NO_STEP = "is no step"
REASONS = 3
"""Reasons that a refusal lists."""
POSSIBLE = "A step has 2^31 > S >= B >= 1; what prefills is a part of B and of S, and no count is below zero."


def steps_from(B: Any, S: Any, given: Mapping[str, Any], *, every_combination: bool) -> Trace:
    """Steps of B requests and S tokens, or of a table in place of B. given: what else is said of the steps, by column.
    Raises WrongUsage for what cannot be a step, BadInput for a table that holds such."""
    known = {name: value for name, value in given.items() if value is not None}
    if B is None:
        raise WrongUsage("no step is given", where="-B", remedy="Give B (and S), or a table of steps.")
    if not _is_number(B):
        if S is not None or known:
            raise WrongUsage("steps are given twice", where="-S", remedy="Give B and S, or a table of steps.")
        steps = steps_of(B)
        if (bad := impossible_steps(steps)).any():
            raise BadInput(
                f"row {int(np.argmax(bad)) + 1} {NO_STEP}",
                where=str(B) if isinstance(B, str | Path) else None,
                remedy=POSSIBLE,
            )
        return steps
    names = ", ".join(["-B", "-S", *(f"--{name.replace('_', '-')}" for name in known)])
    wanted = {"B": B, "S": B if S is None else S, **known}
    try:
        columns = {name: np.asarray(value, dtype=np.float64) for name, value in wanted.items()}
        if every_combination and S is not None:
            columns |= _combinations(np.ravel(columns["B"]), np.ravel(columns["S"]))
        flat = dict(zip(columns, map(np.ravel, np.broadcast_arrays(*columns.values())), strict=True))
    except ValueError as error:
        raise WrongUsage(
            f"these do not belong together ({error})", where=names, remedy="Give arrays of one shape."
        ) from None
    if not len(flat["B"]):
        B, S = (", ".join(f"{each:g}" for each in np.ravel(np.asarray(wanted[name], float))[:FEW]) for name in "BS")
        raise WrongUsage(
            f"no step has S >= B >= 1: B = {B}; S = {S}",
            where="-B, -S",
            remedy="A request computes at least one token.",
        )
    steps = Trace(flat)
    whole = np.logical_and.reduce([np.isfinite(column) for column in flat.values()])
    if (bad := ~whole | impossible_steps(steps)).any():
        row = int(np.argmax(bad))
        shown = f"B = {flat['B'][row]:g}, S = {flat['S'][row]:g}"
        raise WrongUsage(f"{shown} {NO_STEP}", where=names, remedy=POSSIBLE)
    return steps


def _is_number(value: Any) -> bool:
    """Whether it is a number or an array of them, not a table."""
    if isinstance(value, str | Path | Mapping | Trace) or hasattr(value, "columns"):
        return False
    return bool(np.asarray(value, dtype=object).dtype.kind) and not hasattr(value, "column_names")


def _combinations(B: FloatArray, S: FloatArray) -> dict[str, FloatArray]:
    pairs = [(b, s) for b in B for s in S if 1 <= b <= s]
    return {"B": np.array([b for b, _ in pairs]), "S": np.array([s for _, s in pairs])}


@dataclass(frozen=True)
class Predicted:
    """Latency of steps by column (each (n,)), the level of the interval, and what was taken for granted."""

    columns: Mapping[str, Any]
    level: float
    notes: Sequence[str]

    @property
    def frame(self) -> Any:
        """A pandas DataFrame with `level` and `notes` as its attributes."""
        import pandas as pd

        found = pd.DataFrame(dict(self.columns)).rename(columns={"low": "low_ms", "high": "high_ms"})
        found.attrs |= {"level": self.level, "notes": list(self.notes)}
        return found

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit predict --json`."""
        rows = zip(*(column.tolist() for column in self.columns.values()), strict=True)
        return {"rows": [dict(zip(self.columns, row, strict=True)) for row in rows], "notes": list(self.notes)}


def predicted(fit: FitResult, steps: Trace, level: float, context: Any, *, strict: bool) -> Predicted:
    """Typical latency and interval of each step. Raises BadInput, WrongUsage."""
    steps = with_context(fit, steps, context)
    found = predict(fit, steps, level)
    if strict and found.outside.any():
        reasons = list(dict.fromkeys(why for why in found.why_outside.tolist() if why))
        more = f"; and {len(reasons) - REASONS:,} more" if len(reasons) > REASONS else ""
        raise BadInput(
            f"{int(found.outside.sum()):,} of {len(steps):,} steps cannot be predicted"
            f" ({'; '.join(reasons[:REASONS])}{more})",
            remedy="Ask inside the fit's domain, measure there, or leave out --strict.",
        )
    columns = {
        "B": _whole(steps.floats("B")),
        "S": _whole(steps.floats("S")),
        "T_ms": found.T_ms,
        "low": found.low,
        "high": found.high,
        "level": found.level,
        "outside_domain": found.outside,
        "why_outside": found.why_outside,
        "why_no_interval": found.why_no_interval,
    }
    return Predicted(columns, level, (*found.notes, *_what_time(fit)))


def _what_time(fit: FitResult) -> list[str]:
    """What a latency is, where the fit's steps knew both."""
    time = str(fit.data.more.get("time"))
    told = {PERIOD: "Latency is the period: from one step to the next.", COMPUTE: "Latency is compute: no host time."}
    return [told[time]] if time in told else []


PREFILL = ("prefill_requests", "prefill_tokens")


def tell_unread(fit: FitResult, said: Mapping[str, Any]) -> None:
    """Tell what is said of steps, by name, though the fit does not depend on it."""
    unread = {} if fit.reads_context else {"context": "cached tokens", CONTEXT: "cached tokens"}
    if len(fit.limits.by_phase) <= 1 and set(fit.columns) <= {"B", "S", CONTEXT}:
        unread |= dict.fromkeys(PREFILL, "prefill")
    for name, what in unread.items():
        if said.get(name) is not None:
            ignored(f"--{name.replace('_', '-')}", f"the {fit.model} fit does not depend on {what}")


def _whole(column: FloatArray) -> Any:
    """Counts as integers where they are."""
    return column.astype(np.int64) if np.all(column == np.floor(column)) else column


def with_context(fit: FitResult, steps: Trace, context: Any) -> Trace:
    """The steps with so many cached tokens a decoding request. Raises WrongUsage where they name others."""
    if context is None:
        return steps
    if CONTEXT in steps:
        raise WrongUsage("the cached context is given twice", where="--context", remedy="Give it a request or a step.")
    if not float(context) >= 0:
        raise WrongUsage("a context cannot be below zero", where="--context", remedy="Give 0 or more.")
    known = {name: steps.floats(name) for name in SOURCES if name in steps}
    found = with_typical_context(known, {**fit.typical, CONTEXT: float(context)})
    return steps.with_columns(**{name: column for name, column in found.items() if name not in known})


def grid_of(fit: FitResult, name: str, count: int, named: Any) -> FloatArray:
    """The different values that were named, in order; without any so many whole numbers over the measured range of a
    column, evenly in the logarithm."""
    if named is not None:
        return np.unique(np.atleast_1d(np.asarray(named, dtype=np.float64)))
    low, high = fit.domain[name]
    return np.unique(np.round(np.geomspace(max(low, 1.0), max(high, 1.0), count)))


SEEN = "The fit was made of steps of this file: on others expect its cross-validated error."

MUCH_WORSE = 1.5
"""Times the cross-validated error from which an error on other steps puts a fit in doubt."""


@dataclass(frozen=True, repr=False)
class Evaluation(Answer):
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
    def state(self) -> State:
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
        own = "" if known is None else f"; held-out error of the fit {format_percent(known)}"
        return f"Error {format_percent(found['mape_pct'])} on {found['n']:,} steps{own}."

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
    def table(self) -> Any:
        """DataFrame: errors over all steps and by phase, in percent and ms."""
        import pandas as pd

        rows = {"all": self.scores["metrics"], **self.scores["by_phase"]}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("phase")

    @property
    def lines(self) -> list[str]:
        return [*([data_line(self.data)] if self.data else []), self.coverage_line]

    @property
    def messages(self) -> list[Message]:
        return list(map(note, self.scores["notes"]))

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """Errors by phase, and what tells whether the steps are of the fitted machine."""
        from latfit.reporting import evaluation_table, machine_table

        return [evaluation_table(self.scores), *([] if brief else [machine_table(self.scores["machine"])])]

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit evaluate --json`."""
        return dict(self.scores)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Evaluation":
        return cls(document)
