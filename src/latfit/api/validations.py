"""`validate`: a measured serving run beside its simulation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit import reporting, validation
from latfit.api.answer import Answer, State, WithPage, data_frame
from latfit.api.engines import check_one_engine, engine_settings_of, named_settings, order_of, with_settings
from latfit.api.fits import Fit, PhaseFits, as_fit, fit_phases, names_a_fit
from latfit.api.reading import read, read_timed, recording_of
from latfit.api.request import given_in, ignored, option_of, verb
from latfit.api.requests import LedgerAddRequest, LedgerRequest, ReadRequest, ValidateRequest
from latfit.errors import BadInput, FitNotUsable, WrongUsage
from latfit.inputs import read_json
from latfit.messages import Message, message
from latfit.model import FitResult
from latfit.planning import ServingPlan
from latfit.record import texts_beside
from latfit.simulation import EngineSetup, Routing, step_costs
from latfit.trace import Trace, read_parquet, stored_provenance
from latfit.tuning import Tuning
from latfit.units import count_text, format_ms

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_OTHERS = 0.02  # share of requests by which the server's count may differ from the run


@dataclass(frozen=True, repr=False, eq=False)
class Validation(Answer):
    """Measured against simulated TTFT, TPOT and latency."""

    result: validation.Validation
    setup: EngineSetup
    warnings: Sequence[Message] = ()
    foreign: str = ""  # why the run is of another machine than the fit
    run_speed: validation.RunSpeed | None = None  # at the machine's speed during the run; None if not known

    def check_machine(self) -> None:
        """Raise FitNotUsable for a run of another machine than the fit."""
        if self.foreign:
            found = "the fit is not of the machine that this run was measured on"
            remedy = "Check the engine's limits, fit the machine's own steps; --force compares all the same."
            raise FitNotUsable(found, where=self.result.source, remedy=remedy)

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        found, tables = self.result, reporting.simulation_tables
        speed = "" if self.run_speed is None else self.run_speed.sentence
        lines = [self.setup.line] if self.setup.line else []
        if (calibration := found.calibration) is not None:
            on = f"the first {calibration.requests:,} requests"
            lines.insert(0, f"Calibrated on {on}: {calibration.text}; scored on the rest.")
        clocks = [tables.clocks_table(found)] if found.clocks else []
        return reporting.table.Shown(
            " ".join(filter(None, (self.foreign, found.verdict, speed))),
            "good" if self.agrees else "bad",
            lines,
            [f"  {name.removesuffix('_ms')}: {meaning}" for name, meaning in validation.DEFINITIONS.items()],
            self.warnings,
            clocks or [tables.brief_validation_table(found)],
            [*clocks, *([] if found.watched else [tables.validation_table(found)])],
        )

    @property
    def agrees(self) -> bool:
        """Whether means are within 2 %, p90 and p99 within 4 %."""
        return self.result.agrees

    @property
    def frame(self) -> Any:
        """DataFrame: a row a statistic of a metric."""
        return data_frame(
            {
                "metric": metric.removesuffix("_ms"),
                "statistic": statistic,
                "measured_ms": each.measured,
                "simulated_ms": each.simulated,
                **{name: getattr(each, name) for name in ("error_pct", "limit_pct", "holds")},
            }
            for metric, figures in self.result.metrics.items()
            for statistic, each in figures.items()
        )

    def plot(self) -> "Figure":
        if self.result.watched:
            raise WrongUsage("a watched server tells of no single request", where="--figure", remedy="Leave it out.")
        return reporting.simulation_figures.validation_figure(self.result)

    def to_json(self) -> dict[str, Any]:
        return self.result.to_json() | {
            "foreign": bool(self.foreign),
            "verdict": self.verdict,
            "settings_from": dict(self.setup.origin),
            "run_speed": self.run_speed and self.run_speed.to_json(),
            "warnings": [each.to_json() for each in self.warnings],
        }


@verb(ValidateRequest)
def validate(request: ValidateRequest) -> Validation:
    """Simulate a measured serving run and compare TTFT, TPOT and latency with what was measured.

    Settings that are not named come from the traces and the metrics. Raises WrongUsage, BadInput, FitNotUsable.
    """
    request = with_settings(request)
    run, scatter = request.run, request.service == "fitted"
    is_file = isinstance(run, str | Path) and Path(run).is_file()
    watch = read_parquet(Path(run)) if is_file and validation.is_watched(stored_provenance(Path(run))) else None
    if request.calibrate and watch is not None:
        raise WrongUsage("it needs times of single requests", where="--calibrate", remedy="Leave it out.")
    before, after = request.metrics_before, request.metrics_after
    if watch is None:
        measured, server = (
            validation.as_measured(recording_of(run)),
            None if after is None else validation.read_server(after, before),
        )
    else:
        if after is None:
            before, after = texts_beside(Path(run))
        elif before is None:
            raise WrongUsage("a watch began at some text", where="--metrics-after", remedy="Add --metrics-before.")
        server = validation.read_server(after, before)
        measured = validation.watched(watch, server.seen, Path(run).name, request.seed)
    fits, setup, starts = _fits_and_setup(request, None if server is None else server.seen.last.facts)
    settings = replace(setup.settings, order=order_of(request))
    replicas = measured.engines if request.replicas == 1 else request.replicas
    how = validation.ValidationOptions(
        request.calibrate, request.seed, Routing(replicas, request.route, request.prefix_share), server
    )
    costs = step_costs(*fits.results, scatter=scatter)
    found = validation.validate(measured, costs, settings, how)
    apart = validation.not_together(starts, measured, None if server is None else server.seen.last.started_s)
    prefill = None if fits.prefill is None else fits.prefill.result
    counted = len(measured) if server is None or found.watched else server.requests
    others = abs(counted - len(measured)) > MAX_OTHERS * len(measured)
    warnings = [
        *(
            message("engine_setup", what=each.text, option=f"If not so, give {each.option}." if each.option else "")
            for each in setup.notes
        ),
        *([] if apart is None else [apart]),
        *(message("left_out", what=note) for note in measured.notes),
        *([message("other_requests", counted=counted, requests=len(measured))] if others else []),
        *(message("engine_setup", what=each, option="") for each in fits.notes),
        *validation.cautions_about(fits.decode.result, prefill, found.run, settings),
    ]
    speed = None
    if request.run_steps is not None:
        steps = _steps_of_run(request.run_steps, fits, how, measured)
        speeds = validation.phase_speeds(steps, fits.decode.result, prefill, scatter=scatter)
        speed = validation.run_speed(measured, costs, settings, how, speeds)
    elif watch is not None:
        windows = validation.recorded_window_speed(watch, fits.results)
        if windows is not None and windows.has_changed:
            speed = validation.run_speed(measured, costs, settings, how, (windows, []))
    # Requests that wait for an unknown cache's blocks are not simulated, and steps seem to be of another speed.
    is_known = setup.origin.get("kv_blocks") is not None
    foreign = validation.not_of_machine(fits.results, found if speed is None else speed.at_speed) if is_known else ""
    return Validation(found, setup, warnings, foreign, speed)


def _fits_and_setup(
    request: ValidateRequest, facts: Mapping[str, Any] | None
) -> tuple[PhaseFits, EngineSetup, list[Any]]:
    fit = request.fit
    if isinstance(fit, list | tuple) and len(fit) == 1:
        (fit,) = fit
    known = {**named_settings(request), "batching": request.batching, "server": facts}
    if isinstance(fit, Fit | FitResult | PhaseFits) or names_a_fit(fit):
        prefill = None if request.prefill_fit is None else as_fit(request.prefill_fit)
        fits = fit if isinstance(fit, PhaseFits) else PhaseFits(as_fit(fit), prefill)
        for name in {"model", "time", "where"} & given_in(request):
            ignored(option_of(ValidateRequest, name), "the steps are fitted already")
        if not request.force:
            check_one_engine(*fits.results)
        starts = [start for each in fits.results for start in validation.starts_of(each.provenance.get("trace") or {})]
        return fits, engine_settings_of(fits.results, **known), starts
    if request.prefill_fit is not None:
        ignored("--prefill-fit", "the trace has steps with prefill of its own")
    steps = read(fit, where=request.where)
    setup = engine_settings_of(steps, **known)
    cache_tokens = setup.settings.cache_tokens
    fits = fit_phases(steps, cache_tokens=cache_tokens, model=request.model, seed=request.seed, time=request.time)
    return fits, setup, validation.starts_of(steps.trace.provenance, steps.trace)


def _steps_of_run(
    run_steps: Any, fits: PhaseFits, how: validation.ValidationOptions, measured: validation.Measured
) -> Trace:
    """Return the steps recorded during a run. Raises BadInput."""
    steps = read_timed(ReadRequest(run_steps), fits.decode.time).trace
    starts = validation.starts_of(steps.provenance, steps)
    server_started_s = None if how.server is None else how.server.seen.last.started_s
    other = validation.not_together(starts, measured, server_started_s)
    within = validation.during(steps, measured)
    if within.any() and other is None:
        return steps.select(within)
    found, remedy = "none of its steps is of the run", "Give what was recorded meanwhile."
    last_s = max((each.last_s for each in starts if each.every_s is None), default=math.nan)
    is_other_start = other is not None and server_started_s is not None
    if not is_other_start and measured.began_s is not None and last_s < measured.began_s:
        found = f"its last step is {format_ms(1e3 * (measured.began_s - last_s))} older than the run"
        remedy = "The recorder writes steps 5 min late (LATFIT_TRACE_SECONDS): wait, or stop the engine."
    elif other is not None:
        remedy = f"{other.message}."
    raise BadInput(found, where="--run-steps", remedy=remedy)


@dataclass(frozen=True, repr=False, eq=False)
class LedgerAnswer(WithPage):
    """Promises with what was measured. result: the record."""

    result: validation.Ledger
    title = "Ledger of promises"

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        kept, all_ = self.result.kept
        verdict = f"{kept} of {count_text(all_, 'promise')} kept, in {count_text(len(self.result.counted), 'run')}."
        state: State = "good" if all_ and kept == all_ else "doubt" if not all_ else "bad"
        return reporting.table.Shown(
            verdict if all_ else "The ledger has no run of a planned load.",
            state,
            reporting.simulation_tables.ledger_lines(self.result),
            brief=[reporting.simulation_tables.ledger_table(self.result, brief=True)],
            tables=[reporting.simulation_tables.ledger_table(self.result)],
        )

    def to_json(self) -> dict[str, Any]:
        kept, all_ = self.result.kept
        coverage = self.result.coverage_pct
        share, interval = (None, None) if coverage is None else coverage
        return self.result.to_json() | {
            "kept": kept,
            "promises": all_,
            "coverage_pct": share,
            "coverage_interval_pct": None if interval is None else list(interval),
        }


@verb(LedgerRequest)
def ledger(request: LedgerRequest) -> LedgerAnswer:
    """Show what plans promised and what runs measured. Raises BadInput."""
    source = Path(request.ledger)
    if not source.exists():
        raise BadInput("no such ledger", where=str(source), remedy="Begin one: latfit ledger add plan.json run.json.")
    return LedgerAnswer(validation.read_ledger(source))


@verb(LedgerAddRequest)
def add_to_ledger(request: LedgerAddRequest) -> LedgerAnswer:
    """Compare a run with its plan and add both to a ledger. Raises BadInput, TargetNotWritable."""
    source = Path(request.plan)
    document = read_json(source, what="plan", made_by="latfit plan --out plan.json")
    tuned = isinstance(document, Mapping) and "runs" in document
    if tuned == (request.run is not None):
        found = "a tuning has its own run" if tuned else "no run is given"
        raise BadInput(found, where=str(source), remedy="Give plan.json and run.json, or tune.json alone.")
    if tuned:
        entry = Tuning.from_json(document, str(source)).as_entry(str(source))
    else:
        plan = ServingPlan.from_json(document, str(source))
        entry = validation.compare_with_plan(plan, recording_of(request.run), str(source))
    return LedgerAnswer(validation.add_entry(Path(request.ledger), entry))
