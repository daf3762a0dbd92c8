"""`fit_recording`: what the windows of a recording tell, as `fit` and `validate` tell it."""

import math
import shlex
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from latfit.api.answer import State
from latfit.api.engines import ASSUMED
from latfit.api.fits import Fit, fit
from latfit.api.running.recording import Recorded
from latfit.api.validations import Validation, validate
from latfit.errors import LatfitError
from latfit.messages import Message
from latfit.metrics import Buckets, Interval, read_state
from latfit.record import texts_beside
from latfit.trace import open_source
from latfit.units import format_ms, number

if TYPE_CHECKING:
    from latfit.reporting import Table

FEWEST_ENDED = 20
"""Requests that make a mean worth a comparison."""
LIMIT = "max_num_seqs"
"""What vLLM does not tell of itself, and a comparison depends on."""
DECIDING = ("no_better_than_constant", "large_error", "drift")
"""Warnings of a fit that decide whether it is one to use; the others are in its document."""


@dataclass(frozen=True, repr=False, eq=False)
class RecordedFit(Recorded):
    """A recording with its fit, and the load that was seen simulated with it beside the server's own histograms.

    not_fitted, not_validated: why there is none, empty where there is.  seen: from the first text of `/metrics` to the
    last.
    """

    seen: Interval = field(kw_only=True)
    fit: Fit | None = None
    not_fitted: str = ""
    validation: Validation | None = None
    not_validated: str = ""

    @property
    def state(self) -> State:
        """That of the recording, in doubt without a fit that may be used."""
        is_usable = self.fit is not None and self.fit.kept_out() is None
        return super().state if is_usable or not len(self.busy) else "doubt"

    @property
    def lines(self) -> list[str]:
        """The fit with its error, and the comparison in a sentence; or why there is none."""
        if self.fit is None:
            return [self.not_fitted]
        if self.validation is None:
            return [self.fit.verdict, self.not_validated]
        return [self.fit.verdict, self.validation.verdict, *self.validation.lines]

    @property
    def details(self) -> list[str]:
        return [] if self.fit is None else [self.fit.range_line]

    @property
    def messages(self) -> list[Message]:
        """Of the windows, then whether the fit is one to use, then what the simulation is biased by."""
        found = super().messages
        if self.fit is not None and (kept_out := self.fit.kept_out()) is not None:
            found.append(kept_out)
        found += [each for each in (self.fit.warnings if self.fit else ()) if each.code in DECIDING]
        return found + [each for each in (self.validation.warnings if self.validation else ()) if each.needs_action]

    @property
    def next(self) -> list[str]:
        """Commands that make use of it: a plan for the load that was seen, with the p99 of now as limits; of executions
        without tokens a plan of batches, by the machine's profile."""
        if self.fit is None:
            return []
        fit, trace = shlex.quote(str(self.fit_file)), shlex.quote(str(self.out))
        if self.seen.of_executions:
            path = "" if "path" in self.trace else " --path gpu"
            return [f"latfit fit {trace}{path}", "latfit plan --sla 20ms"]
        ends = (self.seen.mean("prompt_lengths"), self.seen.mean("output_lengths"))
        rate = self.seen.arrived / self.seen.seconds
        load = "--rate 20/s --lengths 500:200"
        if rate > 0 and all(tokens >= 1 for tokens in ends):
            load = f"--rate {number(rate, 3)}/s --lengths {round(ends[0])}:{round(ends[1])}"
        ttft = _limit(self.seen.histogram("ttft"), "500ms")
        tpot = _limit(self.seen.histogram("tpot") or self.seen.histogram("itl"), "50ms")
        found = [
            f"latfit plan --fit {fit} {load} --ttft {ttft} --tpot {tpot}",
            f"latfit doctor {shlex.quote(self.server)} --fit {fit}",
        ]
        setup = None if self.validation is None else self.validation.setup
        if setup is not None:
            limit = f"--max-num-seqs {setup.settings[0].max_num_seqs}"
            assumed = {LIMIT: limit, "synchronous": "--synchronous"}
            options = [option for name, option in assumed.items() if setup.origin.get(name, ASSUMED) == ASSUMED]
            if options:
                again = f"latfit validate {fit} {trace} {' '.join(options)}"
                found.append(f"{again}  # assumed above; as the engine has it")
        return found

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit record --json`: fit and validation are those of these commands."""
        return super().to_json() | {
            "fit_file": None if self.fit is None else str(self.fit_file),
            "fit": None if self.fit is None else self.fit.to_json(),
            "not_fitted": self.not_fitted or None,
            "validation": None if self.validation is None else self.validation.to_json(),
            "not_validated": self.not_validated or None,
            "next": self.next,
        }

    def tables(self, *, brief: bool = False) -> "list[Table]":
        return [] if self.validation is None else self.validation.tables(brief=True)


def _limit(seen: Buckets | None, default: str) -> str:
    """The p99 of now as an option; a default where nobody tells it."""
    low, high = (math.nan, math.nan) if seen is None else seen.bucket(0.99)
    edge = high if math.isfinite(high) else 2 * low
    return format_ms(edge).replace(" ", "") if edge > 0 else default


def fit_recording(recorded: Recorded) -> RecordedFit:
    """Fit what `record_server` wrote, as `fit` does, beside it (`NAME.fit.json`); then simulate the load that was seen
    and compare with the server's histograms, as `validate` does.

    Where the windows cannot tell one or the other, the result says why; the recording stays as it is. An earlier fit of
    that name, which is of another recording, is deleted then. Raises TargetNotWritable.
    """
    before, after = texts_beside(recorded.out)
    begin_s, end_s = recorded.trace.provenance["texts_at_s"]
    watched_s = max(float(end_s) - float(begin_s), 1e-3)
    seen = Interval(read_state(open_source(before)), read_state(open_source(after)), watched_s)
    about: dict[str, Any] = {each.name: getattr(recorded, each.name) for each in fields(recorded)} | {"seen": seen}
    try:
        about["fit"] = fit(recorded.out)
    except LatfitError as error:
        recorded.fit_file.unlink(missing_ok=True)
        return RecordedFit(**about, not_fitted=f"Not fitted: {_told(error)}", not_validated="There is no fit.")
    about["fit"].save(recorded.fit_file)
    if seen.finished < FEWEST_ENDED:
        ended = f"{number(max(seen.finished, 0.0))} requests ended in this time"
        return RecordedFit(**about, not_validated=_not_compared(f"{ended}. Record for longer."))
    try:
        return RecordedFit(**about, validation=validate(recorded.fit_file, recorded.out))
    except LatfitError as error:
        return RecordedFit(**about, not_validated=_not_compared(_told(error)))


def _not_compared(why: str) -> str:
    return f"Not compared with the server's own histograms: {why}"


def _told(error: LatfitError) -> str:
    return " ".join(f"{part.rstrip('.')}." for part in (error.found, error.remedy) if part)
