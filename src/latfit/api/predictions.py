"""Predict the latency of steps, and score a fit on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from latfit import reporting
from latfit.api.answer import Answer, PlainAnswer, data_frame
from latfit.api.reading import columns_in
from latfit.api.request import ignored
from latfit.errors import BadInput, FitNotUsable, WrongUsage, tell
from latfit.fitting import Sensitivity, evaluate as score, predict, same_machine
from latfit.messages import Message, note
from latfit.model import CONTEXT, SOURCES, FitResult, with_typical_context
from latfit.stats import FloatArray
from latfit.trace import COMPUTE, PERIOD, CleanTrace, Trace, data_facts, impossible_steps
from latfit.units import count_text, format_percent

MAX_ROWS = 16  # of a table without --verbose
MAX_REASONS = 3  # in a refusal
POSSIBLE = "A step has 2^31 > S >= B >= 1; what prefills is a part of B and of S, and no count is below zero."
SEEN = "The fit was made of steps of this file: on others expect its cross-validated error."
MUCH_WORSE = 1.5  # error on other steps over the cross-validated error, above which the state is "doubt"
TIMES = {PERIOD: "Latency is the period: from one step to the next.", COMPUTE: "Latency is compute: no host time."}


def steps_from(B: Any, S: Any, given: Mapping[str, Any], *, every_combination: bool) -> Trace:
    """Return steps of B requests and S tokens, with further columns, or of a table in place of B.

    Raises WrongUsage for numbers that are no step, BadInput for a table with such.
    """
    known = {name: value for name, value in given.items() if value is not None}
    if B is None:
        raise WrongUsage("no step is given", where="-B, --data", remedy="For example: latfit predict FIT -B 8 -S 512")
    is_table = isinstance(B, str | Path | Mapping | Trace) or hasattr(B, "columns") or hasattr(B, "column_names")
    if is_table:
        if S is not None or known:
            raise WrongUsage("steps are given twice", where="-S", remedy="Give B and S, or a table of steps.")
        steps = columns_in(B, ("B", "S"))
        if (bad := impossible_steps(steps)).any():
            where = str(B) if isinstance(B, str | Path) else None
            raise BadInput(f"row {int(np.argmax(bad)) + 1} is no step", where=where, remedy=POSSIBLE)
        return steps
    names = ", ".join(["-B", "-S", *(f"--{name.replace('_', '-')}" for name in known)])
    try:
        named = {"B": B, "S": B if S is None else S, **known}
        columns = {name: np.asarray(value, dtype=np.float64) for name, value in named.items()}
        if every_combination and S is not None:
            B, S = map(np.ravel, np.meshgrid(columns["B"], columns["S"], indexing="ij"))
            possible = (B >= 1) & (B <= S)
            columns |= {"B": B[possible], "S": S[possible]}
            if possible.any() and not possible.all():
                left_out = count_text(int(np.sum(~possible)), "combination")
                tell(f"note: {left_out} of -B and -S left out: a step has S >= B >= 1.")
        steps = Trace(dict(zip(columns, map(np.ravel, np.broadcast_arrays(*columns.values())), strict=True)))
    except ValueError as error:
        raise WrongUsage(f"these do not belong together ({error})", where=names, remedy="Use one shape.") from None
    if not len(steps):
        raise WrongUsage("no step has S >= B >= 1", where="-B, -S", remedy="A request computes at least one token.")
    bad = reduce(np.logical_or, [~np.isfinite(steps.floats(name)) for name in columns], impossible_steps(steps))
    if bad.any():
        B, S = (steps.floats(name)[np.argmax(bad)] for name in "BS")
        raise WrongUsage(f"B = {B:g}, S = {S:g} is no step", where=names, remedy=POSSIBLE)
    return steps


@dataclass(frozen=True, repr=False, eq=False)
class Predicted(Answer):
    """Latency of steps by column, each (n,)."""

    columns: Mapping[str, Any]
    level: float
    messages: Sequence[Message] = ()

    @property
    def frame(self) -> Any:
        found = data_frame(self.to_json()["rows"]).rename(columns={"low": "low_ms", "high": "high_ms"})
        found.attrs |= {"level": self.level, "notes": [each.message for each in self.messages]}
        return found

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        rows = self.to_json()["rows"]
        table, brief = (reporting.steps.prediction_table(each) for each in (rows, rows[:MAX_ROWS]))
        more = f"... and {len(rows) - MAX_ROWS:,} more: --verbose shows them." if len(rows) > MAX_ROWS else ""
        return reporting.table.Shown(messages=self.messages, brief=[replace(brief, note=more)], tables=[table])

    def to_json(self) -> dict[str, Any]:
        rows = zip(*(column.tolist() for column in self.columns.values()), strict=True)
        notes = [each.message for each in self.messages]
        return {"rows": [dict(zip(self.columns, row, strict=True)) for row in rows], "notes": notes}


def sensitivity_answer(found: Sensitivity, lines: Sequence[str]) -> PlainAnswer:
    document = found.to_json()
    slopes, regions = reporting.steps.sensitivity_table(document), reporting.steps.regions_table(document)
    more = replace(regions, note=f"Slopes at {len(slopes.rows)} steps: --verbose shows them.")
    brief = [more] if len(slopes.rows) > MAX_ROWS else [slopes, regions]
    shown = reporting.table.Shown(lines=lines, brief=brief, tables=[slopes, regions])
    return PlainAnswer({"sensitivity": document}, shown)


def predicted(fit: FitResult, steps: Trace, level: float, context: Any, *, strict: bool) -> Predicted:
    """Return typical latency and interval of each step. Raises BadInput, WrongUsage."""
    steps = _with_context(fit, steps, context)
    found = predict(fit, steps, level)
    if strict and found.outside.any():
        reasons = list(dict.fromkeys(why for why in found.why_outside.tolist() if why))
        few = "the step is" if len(steps) == 1 else f"{int(found.outside.sum()):,} of {len(steps):,} steps are"
        remedy = "Ask inside the fit's domain, measure there, or leave out --strict."
        raise BadInput(f"{few} refused: {'; '.join(reasons[:MAX_REASONS])}", remedy=remedy)
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
    time = TIMES.get(str(fit.data.more.get("time")))
    return Predicted(columns, level, list(map(note, [*found.notes, *([time] if time else [])])))


def note_unread(fit: FitResult, said: Mapping[str, Any]) -> None:
    """Note columns of steps on which the fit does not depend."""
    unread = {} if fit.reads_context else {"context": "cached tokens", CONTEXT: "cached tokens"}
    if len(fit.limits.by_phase) <= 1 and set(fit.columns) <= {"B", "S", CONTEXT}:
        unread |= {"prefill_requests": "prefill", "prefill_tokens": "prefill"}
    for name, what in unread.items():
        if said.get(name) is not None:
            ignored(f"--{name.replace('_', '-')}", f"the {fit.model} fit does not depend on {what}")


def _whole(column: FloatArray) -> Any:
    return column.astype(np.int64) if np.all(column == np.floor(column)) else column


def _with_context(fit: FitResult, steps: Trace, context: Any) -> Trace:
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
    """Return the named values, else whole numbers over the measured range."""
    if named is not None:
        return np.unique(np.atleast_1d(np.asarray(named, dtype=np.float64)))
    low, high = fit.domain[name]
    return np.unique(np.round(np.geomspace(max(low, 1.0), max(high, 1.0), count)))


@dataclass(frozen=True, repr=False)
class Evaluation(Answer):
    """Errors of a fit on a trace."""

    scores: Mapping[str, Any]  # the document of `latfit evaluate --json`
    data: Mapping[str, Any] = field(default_factory=dict)  # what was read and dropped
    held_out_pct: float | None = None  # cross-validated error of the fit

    @property
    def foreign(self) -> bool:
        return bool(self.scores["machine"]["state"] == "other")

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        scores, own = self.scores, self.held_out_pct
        machine, found = scores["machine"], scores["metrics"]
        same = machine["state"] == "same"
        sure = same and (own is None or found["mape_pct"] <= MUCH_WORSE * own)
        held_out = "" if own is None else f"; held-out error of the fit {format_percent(own)}"
        fitted = " that were fitted" * (SEEN in scores["notes"])
        error = f"Error {format_percent(found['mape_pct'])} on {found['n']:,} steps{fitted}{held_out}."
        covered = [
            f"{format_percent(100 * share)} in the {format_percent(100 * float(level))} interval"
            for level, share in scores["interval_coverage"].items()
        ]
        outside = f"{scores['outside_domain']:,} steps outside the measured range"
        table = reporting.steps.evaluation_table(scores)
        return reporting.table.Shown(
            error if same else f"{machine['verdict']} {error}",
            "bad" if self.foreign else "good" if sure else "doubt",
            [reporting.steps.data_line(self.data), f"Coverage: {', '.join([*covered, outside])}."],
            messages=list(map(note, scores["notes"])),
            brief=[table],
            tables=[table, reporting.steps.machine_table(machine)],
        )

    def check_machine(self) -> None:
        """Raises FitNotUsable."""
        if self.foreign:
            found = "the fit is not of the machine that these steps were measured on"
            remedy = "Fit the machine's own steps with `latfit fit`; --force scores these all the same."
            raise FitNotUsable(found, where=str(self.data.get("source") or "steps"), remedy=remedy)

    @property
    def table(self) -> Any:
        rows = {"all": self.scores["metrics"], **self.scores["by_phase"]}
        return data_frame({"phase": name, **row} for name, row in rows.items()).set_index("phase")

    def to_json(self) -> dict[str, Any]:
        return dict(self.scores)


def evaluate(fit: FitResult, steps: CleanTrace) -> Evaluation:
    scores = {**score(fit, steps.trace), "machine": same_machine(fit, steps.trace).to_json()}
    if steps.sha256 == fit.data.sha256:
        scores["notes"] = [SEEN, *scores["notes"]]
    return Evaluation(scores, data_facts(steps, {}, steps.trace), fit.cross_validation.mape_pct)
