"""Planted latencies for FakeDevice, and runs over them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from latfit.profiling.grid import default_cells
from latfit.profiling.host.machine import LoadReading
from latfit.profiling.quality import find_warnings
from latfit.profiling.result import ProfileResult
from latfit.profiling.sampler import run_profile
from latfit.profiling.shapes import StepShape
from tests.unit.profiling.fake_device import FakeDevice, FakeFaults

CELLS = tuple(default_cells(16, 128))


def saturation_ms(B: int, S: int) -> float:
    """T = tau_0 + (w_0 + S) / (P_max (1 - e^(-k_B B)) (1 - e^(-k_S S))) + tau_B B + tau_S S."""
    rate = 12.0 * -math.expm1(-0.4 * B) * -math.expm1(-0.05 * S)
    return 0.8 + (3.0 + S) / rate + 0.02 * B + 0.001 * S


def fake(noise: float = 0.01, seed: int = 0, faults: FakeFaults | None = None) -> FakeDevice:
    return FakeDevice(saturation_ms, noise=noise, seed=seed, faults=faults)


def run_fake(
    device: FakeDevice | Sequence[FakeDevice],
    cells: Sequence[StepShape] = CELLS,
    *,
    budget_s: float = 60.0,
    precision: float = 0.03,
    seed: int = 0,
    load: LoadReading | None = None,
) -> ProfileResult:
    """The result of a run, with its warnings."""
    result = run_profile(device, cells, budget_s=budget_s, precision=precision, seed=seed)
    return replace(result, warnings=tuple(find_warnings(result, load, {})))


def codes(result: ProfileResult) -> set[str]:
    return {warning.code for warning in result.warnings}
