"""Fits as a library: made from anything that can be read, applied to other steps, kept in files."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latfit.api.answer import Answer, State
from latfit.api.many_fits import FitTask, Outcome, all_done, failed
from latfit.api.predictions import SEEN, Evaluation, grid_of, predicted, steps_from, tell_unread
from latfit.api.quantities import by_name, percent
from latfit.api.reading import data_line, host_line, read_timed
from latfit.api.request import verb
from latfit.api.requests import FitEachRequest, FitPhasesRequest, FitRequest, Ranges, ReadRequest, Time
from latfit.catalogue import PREFIX
from latfit.errors import BadInput, FitNotUsable, LatfitError, WrongUsage
from latfit.messages import Message as LatfitWarning
from latfit.model import DataFacts, FitResult, fit_from_json, read_fit, write_fit
from latfit.provenance import run_facts
from latfit.trace import (
    DECODE,
    PERIOD,
    CleanTrace,
    Trace,
    check_one_system,
    data_facts,
    phases,
    read_again,
    system_label,
    system_labels,
)
from latfit.units import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latfit.fitting import DoubtOptions, FitOptions, Sensitivity
    from latfit.reporting import Table

GRID_B, GRID_S = 5, 6
"""Values of B and S that a sensitivity takes where none are named."""


@dataclass(frozen=True, repr=False)
class Fit(Answer):
    """A latency model fitted to steps, with its doubts.

    result: the whole record (`latfit.model.FitResult`).  path: the execution path that the steps ran on, where the
    source or the user said so.  trace: the steps it was made from, where they are at hand.
    """

    result: FitResult
    path: str | None = None
    trace: Trace | None = field(default=None, compare=False)

    @property
    def model(self) -> str:
        return self.result.name

    @property
    def ok(self) -> bool:
        """Whether it can be used; `result.status` says why not."""
        return self.result.status.ok

    @property
    def system(self) -> Mapping[str, str]:
        """What tells its steps from others of the same source: hardware, model, tp, path."""
        found: Mapping[str, str] = self.result.data.more.get("system", {})
        return found

    @property
    def label(self) -> str:
        """Its system as a part of a file's name (see `trace.identity`); empty where the source holds one system."""
        return system_label(self.system)

    @property
    def source(self) -> str:
        return self.result.data.source or ""

    @property
    def time(self) -> Time:
        """What its T is: "period", from one step to the next, or "compute", the time that the source told."""
        return "period" if self.result.data.more.get("time") == PERIOD else "compute"

    @property
    def time_line(self) -> str:
        """Where the period is more than 5 % above the engine's own time, and what that means, in a sentence."""
        return host_line(self.result.data.more)

    @property
    def warnings(self) -> list[LatfitWarning]:
        return list(self.result.warnings)

    @property
    def needs_action(self) -> list[LatfitWarning]:
        """The warnings whose remedy is something to do."""
        return [warning for warning in self.result.warnings if warning.needs_action]

    @property
    def verdict(self) -> str:
        """Errors in and out of sample, beside the linear baseline and a constant, in a sentence."""
        from latfit.reporting import tables

        return tables.trust_sentence(self.result)

    @property
    def state(self) -> State:
        """good: better than the linear baseline. doubt: not so in a phase, or not measured. bad: not usable."""
        from latfit.reporting import tables

        if not self.ok:
            return "bad"
        unsure = self.result.beats_linear is False or self.result.data.nominal or tables.lost_phases(self.result)
        return "doubt" if unsure else "good"

    def kept_out(self, max_error: Any = None) -> LatfitWarning | None:
        """Why it should not be entered into a machine's profile; None where it may be.

        max_error: the cross-validated error that is allowed, "10%" or 10; without it, one far above the noise floor
        of the steps or the error of the linear baseline is not.
        """
        from latfit.fitting import keeps_out

        return keeps_out(self.result, None if max_error is None else percent(max_error, "max_error"))

    @property
    def range_line(self) -> str:
        """The model and the measured range, in a sentence."""
        spans = [
            f"{name} {number(low)} to {number(high)}"
            for name, (low, high) in self.result.domain.items()
            if name in ("B", "S")
        ]
        decode = "" if self.result.knows_prefill else ", decode only"
        return f"Model {self.model}, measured for {', '.join(spans)}{decode}."

    @cached_property
    def parameters(self) -> Any:
        """DataFrame: value, std_error, 95 % interval from low to high, unit, identified, fixed, meaning by name."""
        import pandas as pd

        meanings = {parameter.name: parameter.meaning for parameter in self.result.structure.parameters}
        rows = {name: {**found.to_json(), "meaning": meanings[name]} for name, found in self.result.parameters.items()}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("parameter")

    @property
    def lines(self) -> list[str]:
        return [
            data_line(self.result.data.to_json()),
            *filter(None, [self.time_line]),
            *([self.range_line] if self.ok else []),
            *([f"{self.result.bootstrap['resamples']:,} resampled fits kept."] if self.result.bootstrap else []),
        ]

    @property
    def details(self) -> list[str]:
        return [self.result.status.sentence, *(each.text for each in self.warnings if not each.needs_action)]

    @property
    def messages(self) -> list[LatfitWarning]:
        return self.needs_action

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """Errors by phase; then parameters, errors and bootstrap intervals."""
        from latfit.reporting import tables

        found = [tables.phases(self.result)]
        if not brief:
            errors = tables.errors(self.result)
            shown = errors.only(*(name for name in errors.columns if name not in ("p90 error", "RMSE", "MAE")))
            found += [tables.parameters(self.result, short=True), shown]
            found += [tables.bootstrap_table(self.result)] if self.result.bootstrap else []
        return [each for each in found if each.rows]

    def predict(
        self,
        B: Any = None,
        S: Any = None,
        *,
        context: Any = None,
        context_tokens: Any = None,
        prefill_requests: Any = None,
        prefill_tokens: Any = None,
        level: float = 0.9,
        every_combination: bool = False,
        strict: bool = False,
    ) -> Any:
        """Latency of steps, as a pandas DataFrame.

        B: requests, and S: tokens of each step, numbers or arrays that NumPy broadcasts (S without: B, which is
        decode); every_combination: of the values of B with those of S, as far as S >= B. B may also be a table with
        columns B and S: a file, a DataFrame, an Arrow table.  context: cached tokens of each decoding request;
        context_tokens: those that the whole step reads.  level: share of steps that the interval is to hold.
        strict: raise BadInput for steps outside what was measured.

        Columns: B, S, T_ms (typical), low_ms, high_ms (NaN where the data support no interval), level (of the interval;
        lower than requested where the data support no wider one), outside_domain, why_outside, why_no_interval;
        `.attrs["notes"]` holds assumptions and why intervals are missing. Raises WrongUsage, BadInput.
        """
        given = {
            "context_tokens": context_tokens,
            "prefill_requests": prefill_requests,
            "prefill_tokens": prefill_tokens,
        }
        tell_unread(self.result, {**given, "context": context})
        steps = steps_from(B, S, given, every_combination=every_combination)
        return predicted(self.result, steps, level, context, strict=strict).frame

    def evaluate(self, source: Any, **reading: Any) -> Evaluation:
        """How well it predicts steps that it has not seen: errors overall and by phase, coverage of its intervals; and
        first whether they are of its machine (`.foreign`, `.machine`).

        source, reading: as of `latfit.read`. Raises BadInput where the source holds several systems.
        """
        from latfit.fitting import evaluate, same_machine

        found = read_timed(ReadRequest(source, **reading), self.time)
        check_one_system(found)
        machine, held_out = same_machine(self.result, found.trace), self.result.cross_validation.mape_pct
        scores = {**evaluate(self.result, found.trace), "machine": machine.to_json()}
        if found.sha256 == self.result.data.sha256:
            scores["notes"] = [SEEN, *scores["notes"]]
        return Evaluation(scores, data_facts(found, {}, found.trace), held_out, machine)

    def sensitivity(self, B: Any = None, S: Any = None, context: float | None = None) -> "Sensitivity":
        """What a request or a token more costs, and which term is the largest, on a grid of B and S.

        Without B and S over what was measured; `.frame` is the DataFrame. Raises BadInput where no step of the grid
        lies inside what was measured.
        """
        from latfit.fitting import sensitivity_of

        tell_unread(self.result, {"context": context})
        typical = dict(self.result.typical) if context is None else {"context_tokens": float(context)}
        over_B = grid_of(self.result, "B", GRID_B, B)
        decode = S is None and not self.result.knows_prefill
        over_S = over_B if decode else grid_of(self.result, "S", GRID_S, S)
        found = sensitivity_of(self.result, over_B, over_S, typical)
        if not any(math.isfinite(T) for T in found.T_ms.ravel()):
            raise BadInput(
                "none of the steps lies inside what was measured",
                remedy=f"Ask inside the fit's domain, with {'S >= B' if self.result.knows_prefill else 'S = B'}.",
            )
        return found

    def plot(self) -> "Figure":
        """Latency over (B, S), throughput, and predicted beside measured latency where the steps are at hand."""
        from latfit.reporting import fit_figure

        if not self.ok:
            raise FitNotUsable(self.result.status.sentence, remedy=self.result.status.remedy)
        return fit_figure(self.path or self.model, self.result, self.rows())

    def rows(self) -> Trace | None:
        """The steps that it was made from, where they are at hand or its source is still the same."""
        if self.trace is not None or not self.source:
            return self.trace
        try:
            return read_again(self.result.data.to_json())
        except LatfitError:
            return None

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit fit --json` and of a `.fit.json` file."""
        return self.result.to_json()

    @classmethod
    def from_json(cls, document: Any, path: str | None = None) -> "Fit":
        """The fit in a decoded document. Raises BadInput that names what is wrong with it."""
        return _with_its_path(fit_from_json(document, "the document"), path)

    def save(self, target: str | Path) -> None:
        """Write a `.fit.json` file whole or not at all. Raises TargetNotWritable."""
        write_fit(Path(target), self.result)

    @classmethod
    def load(cls, source: str | Path, path: str | None = None) -> "Fit":
        """The fit in a `.fit.json` file, or of the catalogue by its name. Raises BadInput, WrongUsage."""
        if str(source).startswith(PREFIX):
            from latfit.api.catalogue import fit_in_catalog

            return _with_its_path(fit_in_catalog(str(source)), path)
        return _with_its_path(read_fit(Path(source)), path)

    def __repr__(self) -> str:
        on = f" of path {self.path}" if self.path else ""
        return f"Fit ({self.model}){on}: {self.verdict}"

    def _repr_html_(self) -> str:
        from latfit.reporting import card_html, tables

        figure = self.plot() if self.ok else None
        parameters = [tables.parameters(self.result, short=True)]
        return card_html(repr(self), self.state, parameters, [each.text for each in self.messages], figure)


def _with_its_path(result: FitResult, path: str | None) -> Fit:
    """A stored fit; its system says the path where nobody else does."""
    found = Fit(result, path)
    return found if path else Fit(result, found.system.get("path"))


def names_a_fit(source: Any) -> bool:
    """Whether a text or path is that of a stored fit: a `.json` file, or `catalog:NAME`."""
    return isinstance(source, str | Path) and (str(source).endswith(".json") or str(source).startswith(PREFIX))


def as_fit(source: Any, *, seed: int = 0, time: Time | None = None, **reading: Any) -> Fit:
    """A fit from what stands for one: a Fit, a FitResult, a `.fit.json` file; else a fit of what can be read.

    Raises BadInput, FitNotUsable.
    """
    if isinstance(source, Fit):
        found = source
    elif isinstance(source, FitResult):
        found = _with_its_path(source, None)
    elif names_a_fit(source):
        found = Fit.load(source)
    else:
        return fit(source, seed=seed, time=time, **reading)
    if not found.ok:
        status = found.result.status
        raise FitNotUsable(status.sentence, where=found.source or None, remedy=status.remedy)
    return found


@verb(FitRequest)
def fit(request: FitRequest) -> Fit:
    """Fit a latency model to steps of one system, and check it. Parameters are in ms, requests and tokens.

    Raises WrongUsage for options that cannot be met, BadInput for a source that cannot be read or holds several
    systems (see `fit_each`), FitNotUsable where the steps cannot carry the model.
    """
    steps = read_timed(request)
    check_one_system(steps, "Fit each of them with fit_each, or one of them with where=.")
    check_paths(request.path, steps)
    (found,) = _fitted(steps, request).values()
    if not found.ok:
        status = found.result.status
        raise FitNotUsable(status.sentence, where=steps.name, remedy=status.remedy)
    return found


@verb(FitEachRequest)
def fit_each(request: FitEachRequest) -> dict[str, Fit]:
    """A fit of every system (hardware, model, tp, path) of a source, by its label; see `fit` for the options.

    Many are made at once, on all processor cores. A fit that cannot be used (`.ok`) or that an error ended is among
    them and says why. Raises WrongUsage, BadInput, and the error that ended every one of them.
    """
    steps = read_timed(request)
    check_paths(request.path, steps)
    return _fitted(steps, request, request.made)


@dataclass(frozen=True)
class PhaseFits:
    """Step costs of an engine. decode: of steps of decoding, or of all where prefill is None.  prefill: of steps that
    contain prefill.  notes: rows that were left out, and why there is one fit."""

    decode: Fit
    prefill: Fit | None
    notes: Sequence[str] = ()

    @property
    def results(self) -> list[FitResult]:
        """The records of one fit or of both."""
        return [each.result for each in (self.decode, self.prefill) if each is not None]


@verb(FitPhasesRequest)
def fit_phases(request: FitPhasesRequest) -> PhaseFits:
    """Fits of an engine's steps for a simulation of it: those of decoding apart from those that contain prefill, whose
    cached tokens cost another time. Where one of the phases has too few steps there is one fit of all.

    Raises BadInput, FitNotUsable.
    """
    cache_tokens = request.cache_tokens
    steps = read_timed(request)
    check_one_system(steps)
    trace, notes = steps.trace, []
    kept = np.ones(len(trace), dtype=bool)
    if cache_tokens is not None and "context_tokens" in trace:
        kept = ~(trace.floats("context_tokens") > cache_tokens)
        if not kept.all():
            notes.append(
                f"{np.count_nonzero(~kept):,} of {len(kept):,} steps are left out: more cached tokens than the KV cache"
                f" holds ({cache_tokens:,})."
            )
    decodes = phases(trace) == DECODE

    def of(rows: NDArray[np.bool_]) -> Fit:
        part = replace(steps, cleaned=replace(steps.cleaned, trace=trace.select(rows & kept)))
        return fit(part, model=request.model, seed=request.seed, time=steps.time)  # type: ignore[arg-type]

    parts = {"decode": decodes, "prefill": ~decodes}
    few = [name for name, rows in parts.items() if np.count_nonzero(rows & kept) < FEWEST]
    if not few:
        try:
            return PhaseFits(of(decodes), of(~decodes), notes)
        except FitNotUsable as error:
            few = [f"either phase ({error.found})"]
    notes.append(f"Too few steps of {' and '.join(few)} for a fit of each phase: all steps are fitted together.")
    return PhaseFits(of(np.ones(len(trace), dtype=bool)), None, notes)


FEWEST = 20
"""Steps of a phase that are fitted apart."""


def _options(request: FitRequest) -> tuple["FitOptions", "DoubtOptions"]:
    """What is fitted, and how sure it is; the rest as the fitting package has it. Raises WrongUsage."""
    from latfit.fitting import DoubtOptions, FitOptions

    def given(**names: str) -> dict[str, Any]:
        return {name: value for name, field in names.items() if (value := getattr(request, field)) is not None}

    fixed = by_name(request.fix, "--fix", "P_max=60")
    options = FitOptions(
        **given(model="model", loss="loss", residuals="residuals", weights="weights"),
        fixed={name: _number(value, "--fix", "P_max=60") for name, value in fixed.items()},
        bounds=_ranges(request.bounds, "--set bounds", "k_B=0.01:1", lambda low, high: 0 <= low < high < math.inf),
        priors=_ranges(
            request.prior, "--set prior", "P_max=60:5 (mean and standard deviation)",
            lambda mean, spread: 0 <= mean < math.inf and 0 < spread < math.inf,
        ),
        seed=request.seed,
        window_means=request.window_means,
    )  # fmt: skip
    return options, DoubtOptions(
        resamples=request.bootstrap, progress=request.progress, **given(intervals="intervals", scheme="resample")
    )


def _ranges(
    given: Ranges, option: str, example: str, holds: Callable[[float, float], bool]
) -> dict[str, tuple[float, float]]:
    """Two numbers by parameter: low and high, or mean and deviation. Raises WrongUsage."""
    found = {}
    for name, pair in by_name(given, option, example).items():
        first, second = pair.partition(":")[::2] if isinstance(pair, str) else pair
        found[name] = low, high = _number(first, option, example), _number(second, option, example)
        if not holds(low, high):
            raise WrongUsage(f"{name} of {low:g} and {high:g} is no range", where=option, remedy=f"Write {example}.")
    return found


def _number(value: Any, option: str, example: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise WrongUsage(f"{value!r} cannot be read", where=option, remedy=f"Write it like {example}.") from None


def _fitted(steps: CleanTrace, request: FitRequest, made: Callable[[str, Fit], None] | None = None) -> dict[str, Fit]:
    """A fit of each system by its label, in the order of the systems. Raises the error that ended every one of them."""
    options, doubt = _options(request)
    systems = steps.systems
    labels = system_labels([system for system, _ in systems])
    origin = {**run_facts(options.seed), "trace": dict(steps.trace.provenance)}
    alone = len(systems) == 1

    def task(number: int) -> FitTask:
        system, rows = systems[number]
        inside = doubt if alone else replace(doubt, progress=None)
        return FitTask(rows, options, inside, data_facts(steps, system, rows), origin)

    fits: dict[int, Fit] = {}
    errors: dict[int, Exception] = {}
    with closing(all_done(task, len(systems))) as outcomes:
        for number, outcome in outcomes:
            if isinstance(outcome, Exception):
                errors[number] = outcome
            system, rows = systems[number]
            fits[number] = found = Fit(
                _record(outcome, task(number)), _path_of(steps, system, rows, request.path), rows
            )
            if made is not None:
                made(labels[number] or found.path or "all", found)
            if doubt.progress is not None and not alone:
                doubt.progress(len(fits), len(systems))
    if len(errors) == len(systems):
        raise errors[0]
    return {labels[number] or fits[number].path or "all": fits[number] for number in range(len(systems))}


def _record(outcome: Outcome, task: FitTask) -> FitResult:
    """The fit, or what is told of one that an error ended, with what it would have been made from."""
    if isinstance(outcome, FitResult):
        return outcome
    facts = DataFacts.from_json(task.data)
    return replace(failed(task.options.model, outcome), data=facts, provenance=task.provenance)


def _path_of(steps: CleanTrace, system: Mapping[str, str], rows: Trace, path: str | None) -> str | None:
    """The execution path of a system's fit: `path`, or else the one that its steps name."""
    if path:
        return path.format_map(system) if NAMED_BY in path else path
    return _own_path(rows) or steps.path


def _own_path(rows: Trace) -> str:
    """The execution path that the steps of a system name, empty where they name none."""
    return str(rows["path"][0]) if "path" in rows else ""


NAMED_BY = "{"
"""What a path has that is named by the columns of its system."""


def check_paths(path: str | None, steps: CleanTrace) -> None:
    """Raise WrongUsage for one name for steps of several paths, and for a name by columns that the systems lack or
    share."""
    if path is None:
        return
    if NAMED_BY not in path:
        own = sorted({_own_path(rows) for _, rows in steps.systems} - {""})
        if len(own) > 1:
            raise WrongUsage(
                f"{path!r} would name the steps of several paths: {', '.join(own)}",
                where="--path",
                remedy=f"Choose the steps of one of them: --where \"path == '{own[0]}'\".",
            )
        return
    columns = sorted({name for system, _ in steps.systems for name in system})
    try:
        named = [path.format_map(system) for system, _ in steps.systems]
    except (KeyError, ValueError, IndexError, AttributeError):
        told = f"the columns that tell the systems apart are {', '.join(columns)}" if columns else "there is one system"
        raise WrongUsage(
            f"{path!r} names no path here: {told}", where="--path", remedy="Write {hardware}-tp{tp}."
        ) from None
    if len(set(named)) < len(named):
        raise WrongUsage(
            f"{path!r} gives several systems one path",
            where="--path",
            remedy=f"Name all that tells them apart: {', '.join(f'{{{name}}}' for name in columns)}.",
        )
