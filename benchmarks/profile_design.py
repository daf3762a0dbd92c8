"""The adaptive design against the full grid: how well a fit to what was measured so far predicts, over measuring time.

On the fake device the truth is planted. For this CPU, real steps are recorded once, in rounds over the grid, by the
thread's own CPU time; both designs then measure the recorded machine, whose visits of a cell are drawn from those
recorded and whose truth is the median of all of a cell's samples. So what others do on the machine meanwhile is the
same for both. On the fake clock a fit takes no time; how long all fits of a run took is printed.

Each design runs once a seed with no target but the budget, the full grid until its own target. After every visit the
clock and the samples are known, so that the fit to what was there at a given time can be made afterwards, for both in
the same way. The errors are relative, over all cells of the grid alike: root mean square, and median. Printed are the
medians over the seeds.

How much could be gained at all: with independent noise and cells that cost what their samples take, the best design is
the one that minimises the summed variance of the prediction for the whole cost. It is found by multiplicative steps,
n <- n sqrt(slope / cost) (Torsney 1983), for the parameters of the truth's own fit, as if known beforehand, and as if
no cell had to be warmed up. No design can take a smaller share of the grid's time for the same variance.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tests.unit.profiling.fake_device import FakeDevice

from latfit.api.measuring import refit
from latfit.profiling.adaptive import AdaptiveDesign, Surface, knowledge, rows_to_fit
from latfit.profiling.devices.numpy_device import NumpyDevice
from latfit.profiling.devices.protocol import Device
from latfit.profiling.grid import LEVELS, default_cells, pilot
from latfit.profiling.result import ProfileResult, cell_columns
from latfit.profiling.sampler import rounds, run_profile
from latfit.profiling.shapes import StepShape, model_shape
from latfit.stats import FloatArray
from latfit.trace.table import Trace

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 1.0)
AS_GOOD = 1.05
SEEDS = 6
STEPS_TO_OPTIMUM = 3000


def planted_ms(B: int, S: int) -> float:
    """Steps of 2 to 120 ms, like those of the preset `tiny` on two cores: a saturation law, and a bend that the fitted
    family lacks, 3 % more from 100 tokens on."""
    rate = 17.5 * -np.expm1(-0.03 * S)
    return float((0.3 + S / rate + 0.05 * B + 0.06 * S) * (1.03 if S > 100 else 1.0))


class CpuTime(NumpyDevice):
    """NumPy in one thread whose clock counts what this thread computed: preparing cells and running steps."""

    def __init__(self, seed: int) -> None:
        super().__init__(model_shape("tiny"), threads=1, seed=seed)
        self._spent_s = 0.0

    def prepare(self, cell: StepShape) -> None:
        started = time.thread_time()
        super().prepare(cell)
        self._spent_s += time.thread_time() - started

    def step_ms(self) -> float:
        started = time.thread_time()
        super().step_ms()
        elapsed_s = time.thread_time() - started
        self._spent_s += elapsed_s
        return 1e3 * elapsed_s

    def now_s(self) -> float:
        return self._spent_s


class Replay(FakeDevice):
    """A recorded machine: a cell's visit runs through the warm-up steps and then the samples of one drawn from those
    recorded, and on through others' samples where it asks for more."""

    def __init__(self, recorded: ProfileResult, seed: int) -> None:
        super().__init__(lambda B, S: 0.0)
        self._draws = np.random.default_rng(seed)
        self._queue: list[float] = []
        self._visits: dict[StepShape, dict[int, tuple[list[float], list[float]]]] = {}
        for sample in recorded.samples:
            steps = self._visits.setdefault(recorded.cells[sample.cell], {}).setdefault(sample.visit, ([], []))
            steps[0 if sample.warmup else 1].append(sample.T_ms)

    def prepare(self, cell: StepShape) -> None:
        new = cell not in self.visited
        self.visited.append(cell)
        self._cell = cell
        warmup, samples = self._drawn()
        self._queue = [*(self._visits[cell][0][0] if new else warmup), *samples]

    def step_ms(self) -> float:
        if not self._queue:
            self._queue = list(self._drawn()[1])
        elapsed_ms = self._queue.pop(0)
        self._clock_s += elapsed_ms / 1e3
        return elapsed_ms

    def _drawn(self) -> tuple[list[float], list[float]]:
        assert self._cell is not None
        visits = [each for number, each in self._visits[self._cell].items() if number and each[1]]
        return visits[self._draws.integers(len(visits))]


@dataclass(frozen=True)
class Machine:
    """What both designs measure: a device for each seed, its grid, the true times (cells,), a guess of them."""

    name: str
    opened: Callable[[int], Device]
    cells: tuple[StepShape, ...]
    truth: FloatArray
    guess_ms: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """One seed's runs: seconds the full grid took and its mean steps for a sample in ms over the samples' own, errors
    (shares, 2) of both, and seconds of the thread that the adaptive run's fits took, with their number."""

    full_s: float
    steps_per_sample: float
    grid: FloatArray
    adaptive: FloatArray
    fit_s: float
    fits: int


def errors_at(result: ProfileResult, time_s: float, truth: FloatArray) -> tuple[float, float]:
    """Root mean square and median of the relative errors over the grid, of a fit to the samples until then; NaN where
    they are too few."""
    times: list[list[float]] = [[] for _ in result.cells]
    for sample in result.samples:
        if not sample.warmup and sample.t_s + sample.T_ms / 1e3 <= time_s:
            times[sample.cell].append(sample.T_ms)
    table = cell_columns(result.cells)
    found = refit(rows_to_fit(table, times)) if any(times) else None
    if found is None:
        return np.nan, np.nan
    known = knowledge(found, table, times, result.precision)
    found = refit(rows_to_fit(table, times, known.misfit)) or found
    error = np.expm1(found.log_ms(table) - np.log(truth))
    return float(np.sqrt(np.mean(error**2))), float(np.median(np.abs(error)))


def compare(machine: Machine, seed: int, longest_s: float) -> Run:
    grid = run_profile(
        machine.opened(2 * seed), machine.cells, budget_s=longest_s, design=rounds(np.random.default_rng(seed))
    )
    full_s, spent = grid.elapsed_s, [0.0]

    def timed(rows: Trace) -> Surface | None:
        started = time.thread_time()
        found = refit(rows)
        spent[0] += time.thread_time() - started
        return found

    design = AdaptiveDesign(timed, machine.guess_ms)
    adaptive = run_profile(machine.opened(2 * seed + 1), machine.cells, budget_s=full_s, precision=1e-4, design=design)
    of_grid, of_adaptive = (
        np.array([errors_at(result, share * full_s, machine.truth) for share in SHARES]) for result in (grid, adaptive)
    )
    sampled_ms = sum(sample.T_ms for sample in grid.samples if not sample.warmup)
    return Run(full_s, 1e3 * full_s / sampled_ms, of_grid, of_adaptive, spent[0], design.fits)


def optimal_share(machine: Machine) -> float:
    """Cost of the design of least summed variance over that of the grid measured alike, for the same variance."""
    table = cell_columns(machine.cells)
    surface = refit(table.with_columns(T_ms=machine.truth))
    assert surface is not None
    J, cost = surface.slopes(table), machine.truth / machine.truth.sum()

    def inverse(n: FloatArray) -> FloatArray:
        M = (J * n[:, None]).T @ J
        return np.asarray(np.linalg.inv(M + 1e-12 * np.trace(M) / len(M) * np.eye(len(M))))

    n = np.ones(len(cost))
    of_grid = float(np.trace(J.T @ J @ inverse(n)))
    for _ in range(STEPS_TO_OPTIMUM):
        C = inverse(n)
        n = n * np.sqrt(np.einsum("ij,jk,ik->i", J, C @ (J.T @ J) @ C, J) / cost)
        n /= n @ cost
    return float(np.trace(J.T @ J @ inverse(n))) / of_grid


def reached(errors: FloatArray, target: float) -> float | None:
    """The first share of the time from which on the error stays within the target."""
    within = errors <= AS_GOOD * target
    first = len(within) - int(np.argmin(within[::-1])) if not np.all(within) else 0
    return SHARES[first] if first < len(SHARES) else None


def report(machine: Machine, seeds: int, longest_s: float) -> None:
    runs = [compare(machine, seed, longest_s) for seed in range(seeds)]
    full_s = float(np.median([run.full_s for run in runs]))
    per_sample = float(np.median([run.steps_per_sample for run in runs]))
    grid = np.median([run.grid for run in runs], axis=0)
    adaptive = np.median([run.adaptive for run in runs], axis=0)
    print(f"{machine.name}: {len(machine.cells)} cells; the full grid takes {full_s:.1f} s; {seeds} seeds")
    print("  share of that time         " + "".join(f"{share:7.2f}" for share in SHARES))
    for column, figure in enumerate(("root mean square", "median")):
        for label, errors in (("full grid", grid), ("adaptive", adaptive)):
            told = "".join("      -" if np.isnan(e) else f"{100 * e:6.2f}%" for e in errors[:, column])
            print(f"  {figure:16s} {label:10s}{told}")
        share = reached(adaptive[:, column], grid[-1, column])
        print(f"  {figure:16s} adaptive is as good as the whole grid from {'never' if share is None else share}")
    best = optimal_share(machine)
    fit_s = sum(run.fit_s for run in runs) / len(runs)
    print(
        f"  best design of all: {best:.2f} of the grid's time; without any warm-up {best / per_sample:.2f}; "
        f"{runs[0].fits} fits took {fit_s:.1f} s a run"
    )


def planted(noise: float) -> Machine:
    cells = tuple(default_cells(*LEVELS[1]))

    def opened(seed: int) -> Device:
        return FakeDevice(planted_ms, noise=noise, seed=seed)

    truth = np.array([planted_ms(cell.B, cell.S) for cell in cells])
    return Machine(f"fake device, noise {100 * noise:.0f} %", opened, cells, truth, _guess(opened(999), cells))


def this_cpu(recording_s: float) -> Machine:
    cells = tuple(default_cells(*LEVELS[4]))
    device = CpuTime(0)
    guess = _guess(device, cells)
    recorded = run_profile(device, cells, budget_s=recording_s, precision=1e-4)
    truth = np.array([np.median(times) for times in recorded.times_ms])
    return Machine("this CPU, NumPy, one thread", lambda seed: Replay(recorded, seed), cells, truth, guess)


def _guess(device: Device, cells: Sequence[StepShape]) -> tuple[float, ...]:
    shape = model_shape("tiny")
    cost = pilot(device, shape)
    return tuple(cost.step_ms(shape, cell) for cell in cells)


def main(smoke: bool) -> None:
    for noise in (0.01, 0.05):
        report(planted(noise), 1 if smoke else SEEDS, 20.0 if smoke else 120.0)
    if not smoke:
        report(this_cpu(25.0), SEEDS, 60.0)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
