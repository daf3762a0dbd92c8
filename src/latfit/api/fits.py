"""Fits: made, applied to other steps, kept in files."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit import reporting
from latfit.api.answer import Answer, PlainAnswer
from latfit.api.predictions import (
    Evaluation,
    Predicted,
    evaluate,
    grid_of,
    note_unread,
    predicted,
    sensitivity_answer,
    steps_from,
)
from latfit.api.quantities import by_name, percent
from latfit.api.reading import read_timed
from latfit.api.request import verb
from latfit.api.requests import Clock, FitEachRequest, FitRequest, PredictRequest, ReadRequest
from latfit.catalogue import PREFIX
from latfit.errors import BadInput, FitNotUsable, LatfitError, WrongUsage
from latfit.messages import Message
from latfit.model import DataFacts, FitResult
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

    from latfit.fitting import DoubtOptions, FitOptions, FitTask, Sensitivity
GRID_B, GRID_S = 5, 6  # values of B and S that a sensitivity takes by default
ERRORS = ("model", "steps", "median error", "MAPE", "CV MAPE", "R²")  # columns that fit a terminal
MIN_PHASE_STEPS = 20  # below this a phase shares the fit of all steps


@dataclass(frozen=True, repr=False)
class Fit(Answer):
    """A latency model fitted to steps, with its uncertainty."""

    result: FitResult
    path: str | None = None  # of the steps, if known
    trace: Trace | None = field(default=None, compare=False)  # the steps

    @property
    def model(self) -> str:
        return self.result.name

    @property
    def ok(self) -> bool:
        """Whether it can be used; `result.status` says why not."""
        return self.result.status.ok

    @property
    def system(self) -> Mapping[str, str]:
        """hardware, model, tp, path: what the systems of the source differ in."""
        return dict(self.result.data.more.get("system", {}))

    @property
    def label(self) -> str:
        """The system as a part of a file's name."""
        return system_label(self.system)

    @property
    def source(self) -> str:
        return self.result.data.source or ""

    @property
    def time(self) -> Clock:
        """ "period" from step to step, or "compute", the time in the source."""
        return "period" if self.result.data.more.get("time") == PERIOD else "compute"

    @property
    def time_line(self) -> str:
        return reporting.steps.host_line(self.result.data.more)

    @property
    def warnings(self) -> list[Message]:
        return list(self.result.warnings)

    @property
    def needs_action(self) -> list[Message]:
        return [warning for warning in self.result.warnings if warning.needs_action]

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        fit, tables = self.result, reporting.fit_tables
        facts, warnings = [reporting.steps.data_line(fit.data.to_json()), self.time_line], self.needs_action
        details = [fit.status.sentence, *(each.text for each in self.warnings if not each.needs_action)]
        if not self.ok:
            lines = list(filter(None, facts))
            return reporting.table.Shown(tables.trust_sentence(fit), "bad", lines, details, warnings)
        resampled = f"{fit.bootstrap['resamples']:,} resampled fits kept." if fit.bootstrap else ""
        doubtful = fit.beats_linear is False or fit.data.nominal or tables.lost_phases(fit)
        phases = tables.phases(fit)
        return reporting.table.Shown(
            tables.trust_sentence(fit),
            "doubt" if doubtful else "good",
            list(filter(None, [*facts, self.range_line, resampled])),
            details,
            warnings,
            [phases],
            [phases, tables.parameters(fit), tables.errors(fit).only(*ERRORS)],
        )

    def kept_out(self, max_error: Any = None) -> Message | None:
        """Why it should not be entered into a machine's profile; None where it may be.

        max_error: the largest cross-validated error, "10%" or 10. Default: by noise and baseline.
        """
        from latfit.fitting import keeps_out

        return keeps_out(self.result, None if max_error is None else percent(max_error, "max_error"))

    @property
    def range_line(self) -> str:
        spans = [f"{name} {number(low)} to {number(high)}" for name in "BS" for low, high in [self.result.domain[name]]]
        decode = "" if self.result.knows_prefill else ", decode only"
        return f"Model {self.model}, measured for {', '.join(spans)}{decode}."

    @cached_property
    def parameters(self) -> Any:
        """DataFrame by name: value, std_error, 95 % interval, unit, meaning."""
        import pandas as pd

        meanings = {parameter.name: parameter.meaning for parameter in self.result.structure.parameters}
        rows = {name: {**found.to_json(), "meaning": meanings[name]} for name, found in self.result.parameters.items()}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("parameter")

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
        """Return the latency of steps as a pandas DataFrame.

        B, S: requests and tokens of each step (default S: B, which is decode), numbers or arrays that NumPy broadcasts,
        or all combinations with S >= B. B may also be a table with columns B and S. context: cached tokens of each
        decoding request; context_tokens: those of the whole step. level: coverage of the interval. strict: raise
        BadInput for steps outside what was measured.

        Columns: B, S, T_ms (typical), low_ms, high_ms (NaN where the data support no interval), level (lower than
        requested where the data support no wider one), outside_domain, why_outside, why_no_interval; `.attrs["notes"]`
        holds assumptions. Raises WrongUsage, BadInput.
        """
        given = {
            "context_tokens": context_tokens,
            "prefill_requests": prefill_requests,
            "prefill_tokens": prefill_tokens,
        }
        note_unread(self.result, {**given, "context": context})
        steps = steps_from(B, S, given, every_combination=every_combination)
        return predicted(self.result, steps, level, context, strict=strict).frame

    def evaluate(self, source: Any, **reading: Any) -> Evaluation:
        """Return errors and coverage on other steps, and whether they are of another machine.

        source, reading: as of `latfit.read`. Raises BadInput for several systems.
        """
        steps = read_timed(ReadRequest(source, **reading), self.time)
        check_one_system(steps)
        return evaluate(self.result, steps)

    def sensitivity(self, B: Any = None, S: Any = None, context: float | None = None) -> "Sensitivity":
        """Return what a request or a token more costs, on a grid of B and S (`.frame`). Raises BadInput outside it."""
        from latfit.fitting import sensitivity_of

        note_unread(self.result, {"context": context})
        typical = dict(self.result.typical) if context is None else {"context_tokens": float(context)}
        over_B = grid_of(self.result, "B", GRID_B, B)
        decode = S is None and not self.result.knows_prefill
        over_S = over_B if decode else grid_of(self.result, "S", GRID_S, S)
        found = sensitivity_of(self.result, over_B, over_S, typical)
        if not any(math.isfinite(T) for T in found.T_ms.ravel()):
            remedy = f"Ask inside the fit's domain, with {'S >= B' if self.result.knows_prefill else 'S = B'}."
            raise BadInput("none of the steps lies inside what was measured", remedy=remedy)
        return found

    def plot(self) -> "Figure":
        check_usable(self)
        return reporting.fit_figures.fit_figure(self.path or self.model, self.result, self.rows())

    def rows(self) -> Trace | None:
        """Return the fitted steps; None if they are gone."""
        if self.trace is not None or not self.source:
            return self.trace
        try:
            return read_again(self.result.data.to_json())
        except LatfitError:
            return None

    @classmethod
    def from_json(cls, document: Any, path: str | None = None) -> "Fit":
        return _with_its_path(FitResult.from_json(document), path)

    @classmethod
    def load(cls, source: str | Path, path: str | None = None) -> "Fit":
        """Return the fit in a file or of the catalogue. Raises BadInput, WrongUsage."""
        if str(source).startswith(PREFIX):
            from latfit.api.catalogue import fit_in_catalog

            return _with_its_path(fit_in_catalog(str(source)), path)
        return _with_its_path(FitResult.read(Path(source)), path)

    def __repr__(self) -> str:
        on = f" of path {self.path}" if self.path else ""
        return f"Fit ({self.model}){on}: {self.verdict}"


def _with_its_path(result: FitResult, path: str | None) -> Fit:
    return Fit(result, path or Fit(result).system.get("path"))


def names_a_fit(source: Any) -> bool:
    """Return whether it names a `.json` file or `catalog:NAME`."""
    return isinstance(source, str | Path) and (str(source).endswith(".json") or str(source).startswith(PREFIX))


def check_usable(found: Fit, where: str | None = None) -> None:
    if not found.ok:
        status = found.result.status
        raise FitNotUsable(status.sentence, where=where or found.source or None, remedy=status.remedy)


def as_fit(source: Any) -> Fit:
    """Return the usable fit of a Fit, a FitResult or its file, else fit a source. Raises BadInput, FitNotUsable."""
    if isinstance(source, Fit):
        found = source
    elif isinstance(source, FitResult):
        found = _with_its_path(source, None)
    else:
        found = Fit.load(source) if names_a_fit(source) else fit(source)
    check_usable(found)
    return found


@verb(FitRequest)
def fit(request: FitRequest) -> Fit:
    """Fit a latency model to steps of one system, and check it. Parameters are in ms, requests and tokens.

    Raises WrongUsage, BadInput (also for several systems: see `fit_each`), FitNotUsable.
    """
    steps = read_timed(request)
    check_one_system(steps, "Fit each of them with fit_each, or one of them with where=.")
    (found,) = _fit_systems(steps, request).values()
    check_usable(found, steps.name)
    return found


@verb(FitEachRequest)
def fit_each(request: FitEachRequest) -> dict[str, Fit]:
    """Fit every system (hardware, model, tp, path) of a source, on all processor cores.

    Returns fits by label, including unusable ones (`.ok` is False). Raises WrongUsage, BadInput.
    """
    return _fit_systems(read_timed(request), request, request.made)


@verb(PredictRequest)
def predict_steps(request: PredictRequest) -> Predicted | PlainAnswer:
    found, context = Fit.load(request.fit), request.context
    if request.sensitivity:
        lines = []
        if not found.result.knows_prefill:
            lines.append("The fit contains decode steps only, so a request counts with its token (S = B).")
        if context is None and found.result.assumed_context:
            lines.append(f"All {found.result.assumed_context}.")
        return sensitivity_answer(found.sensitivity(request.B or None, request.S or None, context), lines)
    given = {name: getattr(request, name) for name in ("context_tokens", "prefill_requests", "prefill_tokens")}
    note_unread(found.result, {**given, "context": context})
    source = request.data or request.B or None
    steps = steps_from(source, request.S or None, given, every_combination=request.data is None)
    return predicted(found.result, steps, request.level, context, strict=request.strict)


@dataclass(frozen=True)
class PhaseFits:
    """Step costs of an engine: `decode` of decode steps, or of all where `prefill` is None."""

    decode: Fit
    prefill: Fit | None
    notes: Sequence[str] = ()  # rows that were left out, and why there is one fit

    @property
    def results(self) -> list[FitResult]:
        return [each.result for each in (self.decode, self.prefill) if each is not None]


def fit_phases(
    source: Any,
    *,
    cache_tokens: int | None = None,
    model: str | None = None,
    seed: int = 0,
    time: Clock | None = None,
    **reading: Any,
) -> PhaseFits:
    """Fit an engine's steps for its simulation, decode apart from steps with prefill where both have enough.

    cache_tokens: size of the KV cache; steps with more cached tokens are left out. reading: as of `latfit.read`. Raises
    BadInput, FitNotUsable.
    """
    steps = read_timed(ReadRequest(source, **reading), time)
    check_one_system(steps)
    trace, notes = steps.trace, []
    kept = np.ones(len(trace), dtype=bool)
    if cache_tokens is not None and "context_tokens" in trace:
        kept = ~(trace.floats("context_tokens") > cache_tokens)
        if not kept.all():
            count = f"{np.count_nonzero(~kept):,} of {len(kept):,} steps"
            notes.append(f"{count} are left out: more cached tokens than the KV cache holds ({cache_tokens:,}).")
    decode = phases(trace) == DECODE

    def of(rows: NDArray[np.bool_]) -> Fit:
        part = replace(steps, trace=trace.select(rows & kept))
        return fit(part, model=model, seed=seed, time=steps.time)  # type: ignore[arg-type]

    parts = {"decode": decode, "prefill": ~decode}
    few = [name for name, rows in parts.items() if np.count_nonzero(rows & kept) < MIN_PHASE_STEPS]
    if not few:
        try:
            return PhaseFits(of(decode), of(~decode), notes)
        except FitNotUsable as error:
            few = [f"either phase ({error.found})"]
    notes.append(f"Too few steps of {' and '.join(few)} for a fit of each phase: all steps are fitted together.")
    return PhaseFits(of(np.ones(len(trace), dtype=bool)), None, notes)


def _options(request: FitRequest) -> tuple["FitOptions", "DoubtOptions"]:
    from latfit.fitting import DoubtOptions, FitOptions

    def given(*names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(request, name)) is not None}

    def numbers(option: str, example: str, values: Iterable[Any]) -> list[float]:
        try:
            return [float(value) for value in values]
        except ValueError as error:
            raise WrongUsage(str(error), where=option, remedy=f"Write it like {example}.") from None

    def ranges(name: str, example: str, is_valid: Callable[[float, float], bool]) -> dict[str, tuple[float, float]]:
        option, found = f"--set {name}", {}
        for parameter, pair in by_name(getattr(request, name), option, example).items():
            low, high = numbers(option, example, pair.partition(":")[::2] if isinstance(pair, str) else pair)
            if not is_valid(low, high):
                text = f"{parameter} of {low:g} and {high:g} is no range"
                raise WrongUsage(text, where=option, remedy=f"Write {example}.")
            found[parameter] = low, high
        return found

    fixed = by_name(request.fix, "--fix", "P_max=60")
    normal = "P_max=60:5 (mean and standard deviation)"
    options = FitOptions(
        **given("model", "loss", "residuals", "weights"),
        fixed=dict(zip(fixed, numbers("--fix", "P_max=60", fixed.values()), strict=True)),
        bounds=ranges("bounds", "k_B=0.01:1", lambda low, high: 0 <= low < high < math.inf),
        priors=ranges("prior", normal, lambda mean, spread: 0 <= mean < math.inf and 0 < spread < math.inf),
        seed=request.seed,
        window_means=request.window_means,
    )
    return options, DoubtOptions(
        resamples=request.bootstrap, progress=request.progress, scheme=request.resample or "auto", **given("intervals")
    )


def _fit_systems(
    steps: CleanTrace, request: FitRequest, made: Callable[[str, Fit], None] | None = None
) -> dict[str, Fit]:
    """Fit each system, by label. Raises the error that ended every one."""
    from latfit.fitting import FitTask, failed_fit, fit_all

    options, doubt = _options(request)
    systems, paths = steps.systems, _paths(request.path, steps)
    labels = system_labels([each for each, _ in systems])
    labels = [label or path or "all" for label, path in zip(labels, paths, strict=True)]
    origin = {**run_facts(options.seed), "trace": dict(steps.trace.provenance)}
    alone = len(systems) == 1

    def task(number: int) -> "FitTask":
        system, rows = systems[number]
        inside = doubt if alone else replace(doubt, progress=None)
        return FitTask(rows, options, inside, data_facts(steps, system, rows), origin)

    fits: dict[int, Fit] = {}
    errors: list[Exception] = []
    with closing(fit_all(task, len(systems))) as outcomes:
        for number, outcome in outcomes:
            if isinstance(outcome, Exception):
                errors.append(outcome)
                facts = DataFacts.from_json(task(number).data)
                outcome = structs.replace(failed_fit(options.model, outcome), data=facts, provenance=origin)
            fits[number] = Fit(outcome, paths[number], systems[number][1])
            if made is not None:
                made(labels[number], fits[number])
            if doubt.progress is not None and not alone:
                doubt.progress(len(fits), len(systems))
    if len(errors) == len(systems):
        raise errors[0]
    return {labels[number]: fits[number] for number in range(len(systems))}


def _paths(path: str | None, steps: CleanTrace) -> list[str | None]:
    """Return the execution path of each system. Raises WrongUsage."""
    systems = [system for system, _ in steps.systems]
    named = [str(rows["path"][0]) if "path" in rows else "" for _, rows in steps.systems]
    if path is None:
        return [name or steps.path for name in named]
    if "{" not in path:
        if len(several := sorted({*named} - {""})) > 1:
            found = f"{path!r} would name the steps of several paths: {', '.join(several)}"
            remedy = f"Choose the steps of one of them: --where \"path == '{several[0]}'\"."
            raise WrongUsage(found, where="--path", remedy=remedy)
        return [path for _ in systems]
    with suppress(KeyError, ValueError, IndexError, AttributeError):
        filled = [path.format_map(system) for system in systems]
        if len(set(filled)) == len(systems):
            return [*filled]
    columns = ", ".join(f"{{{name}}}" for name in sorted({name for system in systems for name in system}))
    remedy = f"Name the columns in which they differ: {columns or 'there is one system'}."
    raise WrongUsage(f"{path!r} gives no path of its own to each system", where="--path", remedy=remedy)
