"""Whether `compare` can be trusted as a gate: how often it finds a slowdown that is there, and one that is not.

Two runs are made of one measured trace, in two ways.

* Drawn: every step keeps its cell (phase, B, S, cached tokens) and takes the time of a step of that cell, drawn with
  replacement, in both runs.
* Dealt: the visits of each cell that has several are dealt out to the two runs, so that what steps of a visit share
  stays together. Each run holds half of the visits only, and no cell that was visited once; a log is dealt in stretches
  of 50 steps.

The second run is then slower by 0, 5, 10 or 30 % in one phase, or in one region: the steps of more requests, or more or
fewer tokens, than half of them have. The tolerance is 5 %, which is thus the edge: there at most 5 % may be alarms.

Aims: power of 90 % at 10 %, everything at 30 %; false alarms of at most 5 %. How far dealt halves can come is a matter
of how much their visits differ.

Last, runs that are made up: 28 cells of two phases, slower by the tolerance everywhere, so that every alarm is false.
The noise of a visit is normal, of Student's t with two degrees of freedom, log-normal, or of pauses in some visits;
alike in all cells or of very unlike scatter; with as many visits in both runs or not.
`python -m benchmarks.gate [--smoke] [draws]`
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from latfit.api import read
from latfit.fitting import FitOptions, Measured, changes_between, fit_trace
from latfit.model import FitResult
from latfit.trace import DECODE, Trace, phases

ROOT = Path(__file__).parent.parent
SAMPLES = [ROOT / "sample_traces" / f"{name}.parquet" for name in ("cpu_numpy_tiny", "cpu_openvino_bf16_smollm2-135m")]
"""Traces that measure each cell in several visits, so that two runs can be drawn from one."""
MEASURED = ROOT.parent / "shared" / "data" / "steps"
DRAWS = 200
TOLERANCE_PCT = 5.0
SLOWDOWNS = (0.05, 0.1, 0.3)
MOST_ROWS = 4000
"""Rows of a real log that are compared: a stretch of it."""

NOISE: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]] = {
    "normal": lambda rng, shape: rng.normal(0, 1, shape),
    "t of 2": lambda rng, shape: rng.standard_t(2, shape),
    "log-normal": lambda rng, shape: (rng.lognormal(0, 1, shape) - np.exp(0.5)) / 2.16,
    "pauses": lambda rng, shape: (rng.random(shape) < 0.15) * rng.exponential(4, shape) + rng.normal(0, 0.3, shape),
}
"""Of a visit, by its name."""
VISITS = ((1, 1), (3, 3), (1, 2), (2, 1), (1, 4), (4, 1))

Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Source:
    """A trace to draw runs from, with its fit, and the cell of each row (n,)."""

    name: str
    trace: Trace
    fit: FitResult
    cell: Rows

    @staticmethod
    def of(file: Path, where: str | None = None) -> "Source":
        trace = read(file, where=where).trace
        if len(trace) > MOST_ROWS:
            trace = trace.select(np.arange(MOST_ROWS))
        names = [name for name in ("B", "S", "prefill_tokens", "context_tokens") if name in trace]
        table = np.stack([trace.floats(name) for name in names])
        return Source(file.stem, trace, fit_trace(trace), np.unique(table, axis=1, return_inverse=True)[1].ravel())

    def drawn(self, rng: np.random.Generator) -> tuple[Trace, Trace]:
        """Two runs with the same steps, whose times are drawn within cells."""
        order, size = np.argsort(self.cell, kind="stable"), np.bincount(self.cell)
        start = np.cumsum(size) - size
        T = self.trace.floats("T_ms")
        return tuple(  # type: ignore[return-value]
            self.trace.with_columns(
                T_ms=T[order[start[self.cell] + (rng.random(len(T)) * size[self.cell]).astype(np.intp)]]
            )
            for _ in range(2)
        )

    def dealt(self, rng: np.random.Generator) -> tuple[Trace, Trace]:
        """Half of each cell's visits in either run."""
        side = self.sides(rng)
        return self.trace.select(side == 0), self.trace.select(side == 1)

    @property
    def log(self) -> bool:
        """Whether no cell stays for long."""
        return bool(np.mean(np.diff(self.cell, prepend=-1) != 0) > 0.5)

    def sides(self, rng: np.random.Generator) -> Rows:
        """The run that each step is dealt to (n,), -1 for neither. A visit: steps of a cell one after another, or a
        stretch of a log."""
        begins = np.diff(self.cell, prepend=-1) != 0
        visit = np.cumsum(begins) - 1
        if self.log:
            visit = np.arange(len(visit)) // 50
            return np.asarray((rng.permutation(int(visit[-1]) + 1) % 2)[visit])
        of_visit = self.cell[begins]
        order = np.lexsort((rng.random(len(of_visit)), of_visit))
        size = np.bincount(of_visit)
        rank = np.empty(len(order), dtype=np.intp)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size)
        side = (rank + rng.integers(0, 2, len(size))[of_visit]) % 2
        side[size[of_visit] == 1] = -1
        return np.asarray(side[visit])

    def places(self, trace: Trace) -> Mapping[str, Mask]:
        """The phases and regions of a run that are slowed down."""
        phase, B, S = phases(trace).astype(str), trace.floats("B"), trace.floats("S")
        rest = phase != DECODE
        middle = (np.median(self.trace.floats("B")), np.median(self.trace.floats("S")))
        found = {str(name): np.asarray(phase == name) for name in np.unique(phase)}
        found |= {"large B": middle[0] < B, "large S": middle[1] < S, "small S": middle[1] > S}
        return {name: mask for name, mask in found.items() if mask.any() and (name != "large S" or rest.any())}


@dataclass(frozen=True)
class Row:
    """A line of the table: how many draws of all were alarms."""

    source: str
    runs: str
    place: str
    slowdown: float
    alarms: int
    draws: int

    @property
    def share(self) -> float:
        return self.alarms / self.draws


def alarm(fit: FitResult, first: Trace, other: Trace) -> bool:
    """Whether the second run counts as slower."""
    (found,) = changes_between([(Measured.of(fit, first), Measured.of(fit, other))], TOLERANCE_PCT)
    return found.gravest == "slower"


def slowed(trace: Trace, place: Mask, slowdown: float) -> Trace:
    return trace.with_columns(T_ms=np.where(place, trace.floats("T_ms") * (1 + slowdown), trace.floats("T_ms")))


def table(source: Source, runs: str, draws: int) -> Iterator[Row]:
    """Alarms without a slowdown and with each, in the same draws."""
    counts: dict[tuple[str, float], int] = {}
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        first, other = source.drawn(rng) if runs == "drawn" else source.dealt(rng)
        cases = [("nowhere", 0.0, np.zeros(len(other), dtype=bool))]
        cases += [(name, much, mask) for name, mask in source.places(other).items() for much in SLOWDOWNS]
        for name, much, mask in cases:
            counts[name, much] = counts.get((name, much), 0) + alarm(source.fit, first, slowed(other, mask, much))
    for (name, much), alarms in counts.items():
        yield Row(source.name, runs, name, much, alarms, draws)


def made_up(noise: str, visits: int, spread: float, rng: np.random.Generator) -> Trace:
    """Visits of four steps to 10 cells of decode and 18 of mixed steps, which share 5 % of this noise in the median
    cell, and e^spread times as much in one cell of six; steps scatter by 1 %."""
    B = np.concatenate([2.0 ** np.arange(10), np.repeat([4.0, 16.0, 64.0], 6)])
    S = np.concatenate([B[:10], B[10:] * np.tile(2.0 ** np.arange(1, 7), 3)])
    scale = 0.05 * np.exp(spread * ndtri((np.random.default_rng(1).permutation(28) + 0.5) / 28))
    y = np.log(4 + 0.05 * B + 0.01 * S) + scale * NOISE[noise](rng, (visits, 28))
    B, S, y = (np.repeat(np.broadcast_to(column, y.shape).ravel(), 4) for column in (B, S, y))
    T = np.exp(y + rng.normal(0, 0.01, len(y)))
    return Trace({"B": B, "S": S, "T_ms": T, "phase": np.where(B == S, "decode", "mixed")})


def false_alarms(noise: str, visits: tuple[int, int], spread: float, draws: int) -> float:
    """Share of alarms where the second run is slower by the tolerance everywhere."""
    count, everywhere = 0, np.ones(visits[1] * 28 * 4, dtype=bool)
    fit = fit_trace(made_up(noise, 3, spread, np.random.default_rng(0)), FitOptions("linear"))
    for seed in range(draws):
        rng = np.random.default_rng((seed, *visits))
        first, other = (made_up(noise, n, spread, rng) for n in visits)
        count += alarm(fit, first, slowed(other, everywhere, TOLERANCE_PCT / 100))
    return count / draws


def sources(smoke: bool) -> Iterator[Source]:
    for file in SAMPLES[: 1 if smoke else None]:
        yield Source.of(file)
    if MEASURED.is_dir() and not smoke:
        yield Source.of(MEASURED / "ibm_llm_pilot_llama-7b_h100_tp1.parquet", "run == 'users=16'")


def main(smoke: bool = False, draws: int = DRAWS) -> list[Row]:
    """Print the table; all its rows."""
    draws = 4 if smoke else draws
    found: list[Row] = []
    for source in sources(smoke):
        for runs in ("drawn", "dealt"):
            begun = time.process_time()
            rows = list(table(source, runs, draws))
            took = (time.process_time() - begun) / draws / len(rows)
            print(
                f"{source.name}, times {runs}: {len(source.trace):,} steps, {draws} draws, {1e3 * took:.0f} ms each",
                flush=True,
            )
            print(f"  false alarms {100 * rows[0].share:.1f} %")
            for place in dict.fromkeys(row.place for row in rows[1:]):
                shares = [f"{100 * row.slowdown:.0f} %: {100 * row.share:5.1f} %" for row in rows if row.place == place]
                print(f"  slower in {place:<9} {'   '.join(shares)}", flush=True)
            found += rows
    print(f"made up, slower by {TOLERANCE_PCT:g} % everywhere, {draws} draws: alarms by visits in the two runs")
    for noise in NOISE:
        for spread, cells in ((0.0, "cells alike"), (1.0, "unlike cells")):
            shares = [
                f"{n} and {m}: {100 * false_alarms(noise, (n, m), spread, draws):4.1f} %"
                for n, m in VISITS[: 1 if smoke else None]
            ]
            print(f"  {noise:<10} {cells:<12} {'   '.join(shares)}", flush=True)
    return found


if __name__ == "__main__":
    counts = [int(text) for text in sys.argv[1:] if text.isdigit()]
    main("--smoke" in sys.argv[1:], counts[0] if counts else DRAWS)
