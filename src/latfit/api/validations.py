"""`validate`: a measured serving run beside its simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.api.answer import Answer, State
from latfit.api.engines import (
    EngineSetup,
    check_one_engine,
    engine_settings_of,
    named_settings,
    order_of,
    scatters,
    with_settings,
)
from latfit.api.fits import Fit, PhaseFits, as_fit, fit_phases, names_a_fit
from latfit.api.loads import recording_of
from latfit.api.quantities import several
from latfit.api.reading import read, read_timed
from latfit.api.request import given_in, ignored, verb
from latfit.api.requests import ReadRequest, ValidateRequest
from latfit.errors import BadInput, FitNotUsable, WrongUsage
from latfit.fitting import mean_ms, typical_ms
from latfit.messages import Message as LatfitWarning
from latfit.model import FitResult
from latfit.record import texts_beside
from latfit.simulation import Routing, StepCosts, step_costs
from latfit.trace import DECODE, Trace, phases, read_parquet, stored_provenance
from latfit.units import format_ms
from latfit.validation import (
    ALL_STEPS,
    DEFINITIONS,
    OF_DECODE,
    WITH_PREFILL,
    Asked,
    Measured,
    PhaseSpeed,
    RunSpeed,
    ServerRun,
    Validation as Comparison,
    as_measured,
    cautions_about,
    during,
    is_watched,
    not_of_machine,
    not_together,
    phase_speed,
    read_server,
    recorded_window_speed,
    run_speed,
    starts_of,
    validate as compared,
    watched,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from latfit.reporting import Table


@dataclass(frozen=True, repr=False, eq=False)
class Validation(Answer):
    """Measured against simulated TTFT, TPOT and latency. result: the record (`latfit.validation.Validation`).  foreign:
    why the run is not of the machine that the fit is of, empty where it may be.  setup: how the engine is set up.
    run_speed: how fast the machine was during the run, and the comparison at that speed, where its steps are known."""

    result: Comparison
    warnings: Sequence[LatfitWarning] = ()
    foreign: str = ""
    setup: EngineSetup | None = None
    run_speed: RunSpeed | None = None

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
        """Whether every mean is within 2 %, every p90 and p99 within 4 % of what was measured; where the server's
        counts are known, whether the means are within 2 % of its engine's."""
        return self.result.agrees

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        speed = "" if self.run_speed is None else self.run_speed.sentence
        return " ".join(filter(None, (self.foreign, self.result.verdict, speed)))

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
        from latfit.reporting import brief_validation_table, clocks_table, validation_table

        clocks = [clocks_table(self.result)] if self.result.clocks else []
        if brief or self.result.watched:
            return clocks or [brief_validation_table(self.result)]
        return [*clocks, validation_table(self.result)]

    def plot(self) -> "Figure":
        """A matplotlib figure: the distribution of each metric, measured and simulated."""
        from latfit.reporting import validation_figure

        if self.result.watched:
            raise WrongUsage("a watched server tells of no single request", where="--figure", remedy="Leave it out.")
        return validation_figure(self.result)

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit validate --json`."""
        machine = {"foreign": bool(self.foreign), "verdict": self.verdict}
        origin = {"settings_from": {} if self.setup is None else dict(self.setup.origin)}
        speed = {"run_speed": None if self.run_speed is None else self.run_speed.to_json()}
        return (
            self.result.to_json() | machine | origin | speed | {"warnings": [each.to_json() for each in self.warnings]}
        )

    @property
    def lines(self) -> list[str]:
        """The calibration; how the engine is set up and who says so, where that is not options alone."""
        result, told = self.result, []
        if (found := result.constants) is not None:
            error = found.errors
            told.append(
                f"Calibrated on the first {int((~result.scored).sum()):,} requests: decode steps ×"
                f" {found.decode_factor:.3f} ± {error['decode_factor']:.2g}, steps with prefill ×"
                f" {found.prefill_factor:.3f} ± {error['prefill_factor']:.2g}, host time {found.step_ms:.3g} ±"
                f" {error['step_ms']:.2g} ms per step, start delay {found.start_ms:.3g} ± {error['start_ms']:.2g} ms;"
                " scored on the rest."
            )
        return told + ([self.setup.line] if self.setup is not None and self.setup.line else [])

    @property
    def details(self) -> list[str]:
        """What each metric counts."""
        return [f"  {name.removesuffix('_ms')}: {meaning}" for name, meaning in DEFINITIONS.items()]

    @property
    def messages(self) -> Sequence[LatfitWarning]:
        return self.warnings


def _a_fit(source: Any) -> bool:
    """Whether step costs are fitted already."""
    if isinstance(source, list | tuple) and len(source) == 1:
        source = source[0]
    return isinstance(source, Fit | FitResult | PhaseFits) or names_a_fit(source)


@verb(ValidateRequest)
def validate(request: ValidateRequest) -> Validation:
    """Simulate a measured serving run and compare TTFT, TPOT and latency with what was measured.

    The steps of traces are fitted here, decoding apart from steps with prefill. Settings that are not named come from
    the traces and the metrics. Whether the run is of the fits' machine is told first (`.foreign`). Raises WrongUsage,
    BadInput, FitNotUsable.
    """
    request = with_settings(request)
    fit, run, seed, scatter = request.fit, request.run, request.seed, scatters(request.service)
    watch = _watch(run)
    if request.calibrate and watch is not None:
        raise WrongUsage(
            "constants are fitted to some of the client's times, and the server counts all requests",
            where="--calibrate",
            remedy="Leave it out.",
        )
    measured, server = _measured(run, watch, (request.metrics_before, request.metrics_after), seed)
    known = {
        **named_settings(request),
        "batching": request.batching,
        "server": None if server is None else server.facts,
    }
    if _a_fit(fit):
        fits = _given_fits(fit, request.prefill_fit)
        for name in {"model", "time", "where"} & given_in(request):
            ignored(f"--{name}", "the steps are fitted already")
        if not request.force:
            check_one_engine(*(each and each.result for each in (fits.decode, fits.prefill)))
        setup = engine_settings_of(fits.results, **known)
        starts = [start for each in fits.results for start in starts_of(each.provenance.get("trace") or {})]
    else:
        if request.prefill_fit is not None:
            ignored("--prefill-fit", "the trace has steps with prefill of its own")
        steps = read(fit, where=request.where)
        starts = starts_of(steps.trace.provenance, steps.trace)
        setup = engine_settings_of(steps, **known)
        cache_tokens = setup.settings[0].cache_tokens
        fits = fit_phases(steps, cache_tokens=cache_tokens, model=request.model, seed=seed, time=request.time)
    orders = several(request.order)
    if len(setup.settings) != 1 or len(orders) != 1:
        raise WrongUsage("one engine was measured", where="--batching, --order", remedy="Give one.")
    settings = replace(setup.settings[0], order=order_of(replace(request, order=orders[0])))
    beside = measured.engines if request.replicas == 1 else request.replicas
    how = Asked(request.calibrate, seed, Routing(beside, request.route, request.prefix_share), server)
    costs = step_costs(*fits.results, scatter=scatter)
    found = compared(measured, costs, settings, how)
    apart = not_together(starts, measured, None if server is None else server.started_s)
    told = [] if apart is None else [apart]
    told += [*_left_out(measured), *_of_the_server(found, len(measured)), *_of_setup(setup, fits)]
    cautions = cautions_about(*_pair(fits), found.run, settings)
    speed = _run_speed(request.run_steps, watch, fits, found, (costs, how))
    foreign = not_of_machine(fits.results, found if speed is None else speed.at_speed)
    return Validation(found, [*told, *cautions], foreign, setup, speed)


def _run_speed(
    run_steps: Any, watch: Trace | None, fits: PhaseFits, found: Comparison, simulated: tuple[StepCosts, Asked]
) -> RunSpeed | None:
    """How fast the machine was during the run: by its recorded steps, or, where it has changed, by the windows of a
    watch. Raises BadInput where none of the steps is of the run."""
    costs, how = simulated
    speeds: tuple[PhaseSpeed, list[PhaseSpeed]]
    if run_steps is not None:
        steps = _of_run(run_steps, fits, how, found.measured)
        speeds = _speeds(fits, steps, scatter=costs.scatter.on)
    else:
        whole = None if watch is None else recorded_window_speed(watch, fits.results)
        if whole is None or not whole.has_changed:
            return None
        speeds = whole, []
    return run_speed(found.measured, costs, found.settings, how, speeds)


def _of_run(run_steps: Any, fits: PhaseFits, how: Asked, measured: Measured) -> Trace:
    """The steps that were recorded during a run. Raises BadInput where none was."""
    steps = read_timed(ReadRequest(run_steps), fits.decode.time).trace
    started_s = None if how.server is None else how.server.started_s
    starts = starts_of(steps.provenance, steps)
    other = not_together(starts, measured, started_s)
    within = during(steps, measured)
    if within.any() and other is None:
        return steps.select(within)
    last_s = max((each.last_s for each in starts if math.isfinite(each.last_s)), default=math.nan)
    if measured.began_s is not None and last_s < measured.began_s and (other is None or other.code == "other_time"):
        raise BadInput(
            f"its last step is {format_ms(1e3 * (measured.began_s - last_s))} older than the run",
            where="--run-steps",
            remedy="The recorder writes steps 5 min late (LATFIT_TRACE_SECONDS): wait, or stop the engine.",
        )
    raise BadInput(
        "none of its steps is of the run",
        where="--run-steps",
        remedy="Give what was recorded meanwhile." if other is None else f"{other.message}.",
    )


def _speeds(fits: PhaseFits, trace: Trace, *, scatter: bool) -> tuple[PhaseSpeed, list[PhaseSpeed]]:
    """The speed of all recorded steps, and of each phase. scatter: whether simulated steps scatter, so that their mean
    is above the typical one."""
    order = np.argsort(trace.floats("t_s"), kind="stable") if "t_s" in trace else np.arange(len(trace))
    trace, found = trace.select(order), []
    decodes, expected_ms = phases(trace) == DECODE, np.zeros(len(trace))
    for phase, fit, rows in ((OF_DECODE, fits.decode, decodes), (WITH_PREFILL, fits.prefill or fits.decode, ~decodes)):
        steps = trace.select(rows)
        expected_ms[rows] = (mean_ms if scatter else typical_ms)(fit.result, steps)
        found.append(phase_speed(phase, steps.floats("T_ms"), expected_ms[rows]))
    return phase_speed(ALL_STEPS, trace.floats("T_ms"), expected_ms), found


def _measured(
    run: Any, watch: Trace | None, texts: tuple[str | Path | None, str | Path | None], seed: int
) -> tuple[Measured, ServerRun | None]:
    """What was measured of a run, and what its server counted, where that is told. watch: see `_watch`."""
    before, after = texts
    if watch is None:
        return as_measured(recording_of(run)), None if after is None else read_server(after, before)
    if after is None:
        before, after = texts_beside(Path(run))
    elif before is None:
        raise WrongUsage("a watch began at some text", where="--metrics-after", remedy="Add --metrics-before.")
    server = read_server(after, before)
    return watched(watch, before, after, Path(run).name, seed), server


def _watch(run: Any) -> Trace | None:
    """The windows of a running server, where the run is such a recording."""
    file = isinstance(run, str | Path) and Path(run).is_file()
    return read_parquet(Path(run)) if file and is_watched(stored_provenance(Path(run))) else None


def _given_fits(fit: Any, prefill_fit: Any) -> PhaseFits:
    if isinstance(fit, list | tuple):
        (fit,) = fit
    if isinstance(fit, PhaseFits):
        return fit
    return PhaseFits(as_fit(fit), None if prefill_fit is None else as_fit(prefill_fit))


def _pair(fits: PhaseFits) -> tuple[FitResult, FitResult | None]:
    return fits.decode.result, None if fits.prefill is None else fits.prefill.result


def _left_out(measured: Measured) -> list[LatfitWarning]:
    return [LatfitWarning("left_out", note, "Correct these rows, or leave them out.") for note in measured.notes]


MOST_STRANGERS = 0.02
"""Share of requests by which what a server counted may differ from the run."""


def _of_the_server(found: Comparison, requests: int) -> list[LatfitWarning]:
    """Where the server counted other requests than those of the run."""
    server = found.server
    if server is None or found.watched or abs(server.requests - requests) <= MOST_STRANGERS * requests:
        return []
    return [
        LatfitWarning(
            "other_requests",
            f"The server counted {server.requests:,} finished requests, the run has {requests:,}",
            "Save /metrics right before and after the run, with nothing else on the server.",
        )
    ]


GIVE_OPTIONS = "Give options if not so."


def _of_setup(setup: EngineSetup, fits: PhaseFits) -> list[LatfitWarning]:
    """Notes on the settings, each with the option that it names as its remedy."""
    told = [LatfitWarning("engine_setup", each.text, each.option or GIVE_OPTIONS) for each in setup.notes]
    return told + [LatfitWarning("engine_setup", each, GIVE_OPTIONS) for each in fits.notes]
