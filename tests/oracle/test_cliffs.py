"""Cliffs in planted step times: false alarms on smooth machines, power on steps of 10 %, place, size and messages."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

import latfit
from latfit.fitting.checking.cliffs import LEVEL, cliffs_of, measured_sizes
from latfit.model import Cliff, Cliffs, FitResult
from latfit.planning.support import above_cliffs
from latfit.stats import FloatArray

GRIDS = {
    "common": np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128.0]),
    "geometric": np.unique(np.round(np.geomspace(1, 256, 40))),
    "every size": np.arange(1.0, 65.0),
}
SMOOTH: tuple[Callable[[FloatArray], FloatArray], ...] = (
    lambda B: 5 * np.maximum(1, B / 20) + 1,
    lambda B: 1 + 5 * (1 + (B / 20) ** 4) ** 0.25,
    lambda B: 3 + 0.2 * B,
    lambda B: 0.2 * B / (1 - np.exp(-0.1 * B)),
    lambda B: 1 + B**0.6,
)
"""A sharp bend, a smooth one, a line, saturation, a power law."""


def planted(seed: int, grid: FloatArray, rows: int, noise: float, cell: float, cliff: float = np.inf) -> list[Cliff]:
    """Cliffs found in a trace with noise of rows and of sizes, 1 % of steps five times as long, and a step of 10 %."""
    rng = np.random.default_rng(seed)
    B = np.repeat(grid, rows)
    off = cell * rng.normal(size=len(grid)).repeat(rows) + noise * rng.normal(size=len(B))
    T = SMOOTH[seed % len(SMOOTH)](B) * np.exp(off)
    T *= np.where(rng.random(len(B)) < 0.01, 5.0, 1.0) * np.where(cliff < B, 1.1, 1.0)
    sizes = measured_sizes("B", B, np.log(T), np.unique(B, return_inverse=True)[1])
    return cliffs_of(sizes, LEVEL / len(sizes.tested))


def test_the_error_of_a_median_is_that_of_normal_noise() -> None:
    """sqrt(pi/2) s / sqrt(n), at sizes with 900 steps each; the spread of cells of one size counts where it is more."""
    B = np.repeat([1.0, 2.0, 4.0], 900)
    log_ms = np.random.default_rng(0).normal(0, 0.02, len(B))
    found = measured_sizes("B", B, log_ms, np.unique(B, return_inverse=True)[1])
    assert found.error == pytest.approx(np.full(3, np.sqrt(np.pi / 2) * 0.02 / 30), rel=0.1)
    cell = np.arange(len(B)) // 100  # nine of each size
    apart = measured_sizes("B", B, log_ms + np.tile([0.05, -0.05, 0.0], 9)[cell], cell)
    assert apart.error == pytest.approx(np.full(3, 0.05 * np.sqrt(2 / 3 * 27 / 24) / 3), rel=0.1)


@pytest.mark.parametrize(("noise", "cell"), [(0.02, 0.0), (0.01, 0.01)])
def test_smooth_machines_have_no_cliffs(noise: float, cell: float) -> None:
    """At most 5 % of traces may show one; 120 traces on three grids."""
    false = [
        bool(planted(seed, grid, 6, noise, cell))
        for grid in GRIDS.values()
        for seed in range(20 if len(grid) > 50 else 50)
    ]
    assert len(false) == 120
    assert sum(false) <= 0.05 * len(false)


def test_steps_of_ten_percent_are_found() -> None:
    found = [planted(seed, GRIDS["every size"], 6, 0.02, 0.0, cliff=32) for seed in range(40)]
    at_32 = [each for cliffs in found for each in cliffs if each.size == 32]
    assert len(at_32) >= 36
    assert np.mean([each.step_pct for each in at_32]) == pytest.approx(10, abs=2)
    covered = [each.interval_pct[0] <= 10 <= each.interval_pct[1] for each in at_32]
    assert np.mean(covered) >= 0.85
    assert sum(len(cliffs) for cliffs in found) - len(at_32) <= 2


def graphs(B: FloatArray) -> FloatArray:
    """A line in the batch of the captured graph: multiples of 8."""
    return np.asarray(3 + 0.2 * np.ceil(B / 8) * 8)


def test_captured_graphs_are_found_in_a_fitted_log() -> None:
    """Every size of a log with varied context; each graph of 8 more requests is a cliff of known cost."""
    rng = np.random.default_rng(3)
    B = rng.integers(1, 49, 3000).astype(float)
    context = B * rng.integers(200, 800, len(B))
    T = graphs(B) + 2e-5 * context
    steps = pd.DataFrame({"B": B, "S": B, "context_tokens": context, "T_ms": T * np.exp(rng.normal(0, 0.01, len(B)))})
    fit = latfit.fit(steps, model="context").result
    cliffs = fit.diagnostics.cliffs
    assert cliffs is not None
    assert [each.size for each in cliffs.found] == [8, 16, 24, 32, 40]
    for each in cliffs.found:
        size = float(each.size)
        before, after = (graphs(np.array([b])) + 2e-5 * 500 * b for b in (size, size + 1))
        assert each.step_pct == pytest.approx(100 * (after / before - 1)[0], abs=2.5)
        assert each.cost_pct == pytest.approx(100 * (1 - (size + 1) / after * before / size)[0], abs=2.5)
    (note,) = (each for each in fit.warnings if each.code == "note")
    assert "Decode steps take abruptly longer beyond B = 8 (" in note.message
    assert not note.needs_action


def with_cliff(size: int, engine: str) -> FitResult:
    fit = latfit.fit(pd.DataFrame({"B": [1, 2, 4, 8] * 5, "S": [1, 2, 4, 8] * 5, "T_ms": [1, 2, 4, 8.1] * 5})).result
    diagnostics = structs.replace(fit.diagnostics, cliffs=Cliffs([Cliff("B", size, size + 1, 20.0, (18, 22), 15.0)], 9))
    return structs.replace(fit, diagnostics=diagnostics, provenance={"identity": {"engine": engine}})


def test_a_plan_names_the_size_and_the_option_below_its_limit() -> None:
    """A step of 20 % at 32 requests is made up for by 38: from there on more requests make more tokens/s."""
    (found,) = above_cliffs([with_cliff(32, "vllm")], 36, 2048)
    assert found.message == ("max_num_seqs 36 is just above a cliff: decode steps take 20 % longer beyond 32.")
    assert found.remedy == "max_num_seqs 32 makes more tokens/s, or add 36 to cudagraph_capture_sizes."
    assert above_cliffs([with_cliff(32, "vllm")], 32, 2048) == []
    assert above_cliffs([with_cliff(32, "vllm")], 64, 2048) == []
    (other,) = above_cliffs([with_cliff(32, "llama.cpp")], 33, None)
    assert other.remedy == "max_num_seqs 32 makes more tokens/s."
