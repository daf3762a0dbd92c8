"""The adaptive design (cells that tell a fit most for their cost come first) against rounds in shuffled order, at equal
time, on the cells of the sample traces.

A trace is replayed: a visit of a cell runs through its recorded samples from a random one on, the first step 30 %
slower. Printed is the mean relative error, over all cells of the trace, of a fit to what each design had measured after
a share of the time that three visits of every cell take; medians over seeds."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tests.unit.profiling.fake_device import FakeDevice

from latfit import read
from latfit.fitting import solved
from latfit.profiling.adaptive import order_by_information
from latfit.profiling.result import ProfileResult, cell_columns
from latfit.profiling.sampler import SAMPLES_PER_VISIT, VISITS_AT_LEAST, run_profile
from latfit.profiling.shapes import StepShape
from latfit.stats import FloatArray
from latfit.trace import Trace

SAMPLES = Path(__file__).parent.parent / "sample_traces"
SHARES = (0.07, 0.1, 0.2, 0.35, 0.5, 1.0)
SEEDS = 5
FIRST_STEP = 1.3
MIN_SAMPLES = 4


class Replay(FakeDevice):
    """A recorded machine."""

    def __init__(self, recorded: Mapping[StepShape, FloatArray], seed: int) -> None:
        super().__init__(lambda B, S: 0.0)
        self._recorded, self._draws, self._at = recorded, np.random.default_rng(seed), 0

    def prepare(self, cell: StepShape) -> None:
        self._cell, self._slow_left = cell, 1
        self._at = int(self._draws.integers(len(self._recorded[cell])))

    def step_ms(self) -> float:
        assert self._cell is not None
        times = self._recorded[self._cell]
        elapsed_ms = float(times[self._at % len(times)]) * (FIRST_STEP if self._slow_left else 1.0)
        self._at, self._slow_left = self._at + 1, 0
        self._clock_s += elapsed_ms / 1e3
        return elapsed_ms


def recorded_cells(trace: Path) -> dict[StepShape, FloatArray]:
    """The samples of each cell that has MIN_SAMPLES at least."""
    rows = read(trace).frame
    found = {}
    keys = ["B", "prefill_requests", "prefill_tokens", "context_tokens", "prefill_context_tokens"]
    for key, group in rows.groupby(keys):
        B, chunks, prefill, context, history = (int(value) for value in key)
        decoding, share = B - chunks, prefill // max(chunks, 1)
        cell = StepShape(
            decoding,
            (context - history) // decoding if decoding else 0,
            (prefill - share * (chunks - 1), *(share,) * (chunks - 1)) if chunks else (),
            (history // chunks,) * chunks if chunks else (),
        )
        if len(group) >= MIN_SAMPLES:
            found[cell] = group["T_ms"].to_numpy()
    return found


def error_at(result: ProfileResult, at_s: float, truth: FloatArray) -> float:
    """Error of a fit to what was measured by then; NaN if that does not do for a fit."""
    times: list[list[float]] = [[] for _ in truth]
    for sample in result.samples:
        if not sample.warmup and sample.t_s + sample.T_ms / 1e3 <= at_s:
            times[sample.cell].append(sample.T_ms)
    there = np.flatnonzero([len(each) for each in times])
    table = cell_columns(result.cells)
    medians = np.array([np.median(times[index]) for index in there.tolist()])
    predicted = predict(table.select(there).with_columns(T_ms=medians), table) if len(there) > 4 else None
    return float("nan") if predicted is None else float(np.mean(np.abs(predicted / truth - 1)))


def predict(cells: Trace, table: Trace) -> FloatArray | None:
    """The times of a table by a fit to cells; None if these do not do for a fit."""
    found = solved(cells, "context")
    if found is None:
        return None
    model, theta, _ = found
    columns = {name: table.floats(name) for name in table.columns if name != "phase"}
    return np.maximum(model.latency_ms(theta, columns), 1e-12)


def compare(trace: Path, seeds: Sequence[int]) -> None:
    recorded = recorded_cells(trace)
    if not recorded:
        return  # an engine's run, which repeats no cell
    cells = tuple(recorded)
    truth = np.array([np.median(recorded[cell]) for cell in cells])
    S = np.array([float(cell.S) for cell in cells])
    per_token = np.median((truth - truth.min())[S.min() < S] / S[S.min() < S])
    order = order_by_information(cells, (truth.min() + S * per_token).tolist())
    full_s = VISITS_AT_LEAST * (SAMPLES_PER_VISIT + FIRST_STEP) * truth.sum() / 1e3
    print(f"{trace.stem}: {len(cells)} cells; three visits of each take {full_s:.0f} s")
    for name, first in (("shuffled", ()), ("adaptive", tuple(order))):
        runs = [
            run_profile(Replay(recorded, seed), cells, budget_s=full_s, precision=1e-4, seed=seed, first=first)
            for seed in seeds
        ]
        errors = [np.median([error_at(run, share * full_s, truth) for run in runs]) for share in SHARES]
        print(f"  {name:9s}" + "".join("      -" if np.isnan(e) else f"{100 * e:6.2f}%" for e in errors))


def main(smoke: bool) -> None:
    print("share of the time" + "".join(f"{share:7.2f}" for share in SHARES))
    traces = [trace for trace in sorted(SAMPLES.glob("*.parquet")) if not trace.stem.startswith("rtx")]
    for trace in traces[-1:] if smoke else traces:
        compare(trace, range(1 if smoke else SEEDS))


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
