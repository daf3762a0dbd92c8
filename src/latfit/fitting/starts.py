"""Compare two sides of several runs each, every run of another start of the engine.

A start has a speed of its own: neighbours on the machine, clocks, memory layout. Two single runs cannot separate that
from a change of the code, whatever their number of steps. With several starts a side a run is one observation: for each
phase the mean of ln T over the cells (B, S, prefill, context) that all runs have measured, every cell with the same
weight in each run. The change is the difference of the two sides' means, with Student's t on the variance between runs
of a side, pooled over both sides. Noise within a run is part of that variance.

Each phase is one test; the level is corrected for their number (Bonferroni). Regions of (B, S) are not tested: with few
runs per side, the intervals of so many tests would be too wide to be useful.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from latfit.errors import BadInput
from latfit.fitting.change import (
    LEVEL,
    MIN_MATCHED_STEPS,
    Cells,
    CellSteps,
    Change,
    Measured,
    PhaseChange,
    RegionChange,
    cells_of,
    common_runs,
    percent_of,
)
from latfit.stats import FloatArray


def change_over_starts(first: Sequence[Measured], other: Sequence[Measured]) -> Change:
    """Return how much slower the runs of one side are than those of the baseline.

    Parameters
    ----------
    first, other
        Two runs or more a side, best measured in turn.

    Raises
    ------
    BadInput
        The steps of a run are not at hand, or the runs have no common cells.
    """
    steps = [each.steps for each in (*first, *other)]
    known = [each for each in steps if each is not None]
    if len(known) < len(steps):
        raise BadInput("a fit without its trace is no run", where="--alternate", remedy="Give traces in place of fits.")
    runs = common_runs(known)
    named = [set(np.unique(run.phase).tolist()) for run in runs]
    found, deviations = [], []
    for phase in sorted(set.intersection(*named)):
        rows = [np.flatnonzero(run.phase == phase) for run in runs]
        cells = cells_of(runs, rows)
        both = _in_all(cells)
        kept = [np.isin(cell, both) for cell in cells]
        weights = [run.data.weights[row[keep]] for run, row, keep in zip(runs, rows, kept, strict=True)]
        if not len(both) or min(weight.sum() for weight in weights) < MIN_MATCHED_STEPS:
            continue
        parts = [
            CellSteps.of(first[0].fit, run, row[keep], np.searchsorted(both, cell[keep]))
            for run, row, cell, keep in zip(runs, rows, cells, kept, strict=True)
        ]
        levels = _levels(parts, len(both))
        sides = levels[: len(first)], levels[len(first) :]
        found.append((phase, _region(parts, len(both), len(first)), sides))
    if not found:
        raise BadInput("the runs have no common steps", remedy="Compare runs of one load, so that B and S overlap.")
    phases = []
    for phase, region, sides in found:
        tested, sd = _tested(region, *sides, tests=len(found))
        phases.append(PhaseChange(phase, "steps", tested))
        deviations.append(sd)
    alone = sorted(set.union(*named) - {each.phase for each in phases})
    return Change(phases, alone, None, (len(first), len(other)), 100 * float(np.mean(deviations)))


def _in_all(cells: Sequence[Cells]) -> Cells:
    """Return the cells that every run has."""
    found = np.unique(cells[0])
    for each in cells[1:]:
        found = np.intersect1d(found, each)
    return found


def _levels(parts: Sequence[CellSteps], cells: int) -> FloatArray:
    """Return the mean of ln T of each run, every cell weighted alike in all of them."""
    sizes = np.array([np.bincount(part.cell, part.weights, cells) for part in parts])
    means = np.array([np.bincount(part.cell, part.weights * part.y, cells) for part in parts]) / sizes
    return np.average(means, axis=1, weights=sizes.min(axis=0))


def _region(parts: Sequence[CellSteps], cells: int, first: int) -> RegionChange:
    """Return what is compared, without its change."""
    ends = []
    for name in ("B", "S"):
        columns = [part.run.columns[name][part.rows] for part in parts]
        ends.append((float(min(c.min() for c in columns)), float(max(c.max() for c in columns))))
    counts = [round(float(sum(part.weights.sum() for part in side))) for side in (parts[:first], parts[first:])]
    return RegionChange(ends[0], ends[1], cells, *counts)


def _tested(region: RegionChange, first: FloatArray, other: FloatArray, tests: int) -> tuple[RegionChange, float]:
    """Return the change with its interval, as one of so many tests, and the standard deviation between starts."""
    from scipy.special import stdtrit

    freedom = len(first) + len(other) - 2
    squares = float(np.sum((first - first.mean()) ** 2) + np.sum((other - other.mean()) ** 2))
    sd = math.sqrt(squares / freedom)
    ratio = float(other.mean() - first.mean())
    reach = float(stdtrit(freedom, 1 - (1 - LEVEL) / tests)) * sd * math.sqrt(1 / len(first) + 1 / len(other))
    low, high = percent_of(ratio - reach), percent_of(ratio + reach)
    return replace(region, change_pct=percent_of(ratio), low_pct=low, high_pct=high), sd
