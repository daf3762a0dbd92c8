"""A load as the server served it beside its simulation, with the time to the first token taken apart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.engine_loop.loads import LoadRun
from latfit.api import PhaseFits, Validation, fit_phases, validate
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent
from latfit.workload import Requests

AIMS: Mapping[str, float] = {"TTFT mean": 5, "TPOT mean": 3, "latency mean": 3, "TTFT p50": 10, "TTFT p99": 10}
"""Percent within which the simulation is to be of what the engine counted."""
STATISTICS: Mapping[str, Callable[[FloatArray], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "p50": lambda values: float(np.quantile(values, 0.5)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}
SEEDS = 5
"""Simulations, which differ by how steps scatter; shown is the median."""


@dataclass(frozen=True)
class Row:
    """One figure in ms: the client's, the server's from its API process on, its engine's, and simulated by the engine's
    clock with the steps that were fitted and with those of the load itself; NaN where one of them has none."""

    name: str
    client: float
    server: float
    engine: float
    simulated: float
    own: float

    def off_pct(self, simulated: float) -> float:
        """Simulated against the engine's own."""
        return 100 * (simulated / self.engine - 1) if self.engine > 0.1 else np.nan

    @property
    def missed(self) -> bool:
        return self.name in AIMS and not abs(self.off_pct(self.simulated)) <= AIMS[self.name]

    def line(self) -> str:
        """As text."""
        cells = [_ms(each) for each in (self.client, self.server, self.engine)]
        for each in (self.simulated, self.own):
            off = self.off_pct(each)
            cells += [_ms(each), "" if np.isnan(off) else format_percent(off, signed=True)]
        return f"  {self.name:<26}" + "".join(f"{each:>11}" for each in cells) + ("  missed" * self.missed)


def _ms(value: float) -> str:
    return "–" if np.isnan(value) else format_ms(value)


def compared(fits: PhaseFits, run: LoadRun) -> tuple[Validation, list[Row]]:
    """`latfit validate` of the load generator's result, with the machine's speed told apart by its own steps, and rows
    with those that the probe adds."""

    steps = [str(each) for each in run.steps]

    def simulated(fits: PhaseFits, source: str, seed: int, run_steps: list[str] | None = None) -> Validation:
        return validate(
            fits, source, metrics_before=run.before, metrics_after=run.after, run_steps=run_steps, seed=seed
        )

    own = fit_phases(steps)
    several = [[simulated(each, str(run.arrived), seed) for seed in range(SEEDS)] for each in (fits, own)]
    found = simulated(fits, str(run.result), 0, steps)
    return found, rows_of(found, several, run)


def rows_of(found: Validation, several: Sequence[Sequence[Validation]], run: LoadRun) -> list[Row]:
    """TTFT, TPOT and latency on every clock, then what TTFT is made of. several: simulations of each fit."""
    measured = found.result.measured
    queue, prefill = run.of_requests("queued_time"), run.of_requests("prefill_time")
    nothing = np.full(1, np.nan)
    client = _figures(measured.requests, measured.requests.arrival_ms, measured.first_ms, measured.last_ms)
    server = {"TTFT": 1e3 * run.ttft_s, "TPOT": nothing, "latency": run.of_requests("e2e_latency")}
    engine = {
        "TTFT": queue + prefill,
        "TPOT": run.of_requests("mean_time_per_output_token"),
        "latency": queue + run.of_requests("inference_time"),
        "of TTFT: before the engine": nothing,
        "of TTFT: queue": queue,
        "of TTFT: prefill": prefill,
    }
    simulated = [[_simulated(each) for each in of] for of in several]
    rows = [
        Row(
            f"{name} {which}",
            *(statistic(clock[name]) for clock in (client, server, engine)),
            *(float(np.median([statistic(each[name]) for each in of])) for of in simulated),
        )
        for name in client
        for which, statistic in STATISTICS.items()
    ]
    before = float(np.mean(server["TTFT"]) - np.mean(engine["TTFT"]))
    for name in ("of TTFT: before the engine", "of TTFT: queue", "of TTFT: prefill"):
        means = [float(np.median([np.mean(each[name]) for each in of])) for of in simulated]
        theirs = before if "before" in name else np.nan
        rows.append(Row(name, np.nan, theirs, float(np.mean(engine[name])), *means))
    return rows


def _figures(requests: Requests, since: FloatArray, first: FloatArray, last: FloatArray) -> dict[str, FloatArray]:
    more = np.maximum(requests.output_tokens - 1.0, 1.0)
    return {"TTFT": first - since, "TPOT": (last - first) / more, "latency": last - since}


def _simulated(found: Validation) -> dict[str, FloatArray]:
    run = found.result.run
    return {
        **_figures(run.requests, run.seen_ms, run.first_ms, run.last_ms),
        "of TTFT: before the engine": run.seen_ms - run.requests.arrival_ms,
        "of TTFT: queue": run.start_ms - run.seen_ms,
        "of TTFT: prefill": run.first_ms - run.start_ms,
    }


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    titles = ("client", "server", "engine", "simulated", "off", "own steps", "off")
    print(f"  {'':<26}" + "".join(f"{each:>11}" for each in titles))
    for row in rows:
        print(row.line())
