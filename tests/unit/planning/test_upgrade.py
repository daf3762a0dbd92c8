"""What a change of step times means for a load."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latfit.planning.serving.upgrade import compare_steps
from tests.unit.planning.test_plan import fit_with


def test_the_change_of_a_step_has_a_fixed_and_a_growing_part() -> None:
    """T = 4 + 0.1 B + 0.01 S against 6 + k B + 0.02 S, k about 0.2."""
    k = 0.2 * np.exp(np.random.default_rng(0).normal(0, 0.1, 200))
    domain = {"B": [2, 64], "S": [2, 512]}
    drawn = {"parameters": ["tau_B"], "values": k[:, None].tolist()}
    first = fit_with([4.0, 0.1, 0.01], "linear", domain=domain)
    other = fit_with([6.0, 0.2, 0.02], "linear", domain=domain, draws=drawn)
    plan: Any = SimpleNamespace(
        outcome=SimpleNamespace(batch_size={"p50": 32.0}), engine=SimpleNamespace(max_num_batched_tokens=2048)
    )
    rows = compare_steps(plan, first, other)
    assert [(row.step, row.B, row.S) for row in rows] == [("decode", 32, 32), ("with prefill", 32, 512)]
    for row in rows:
        assert row.before_ms == pytest.approx(4 + 0.1 * 32 + 0.01 * row.S)
        assert row.change_ms == pytest.approx(2 + 0.1 * 32 + 0.01 * row.S)
        assert row.fixed_ms == pytest.approx(2 + 0.1 * 2 + 0.01 * 2)  # of the smallest measured batch
        assert row.growing_ms == pytest.approx(row.change_ms - row.fixed_ms)
        ends = 2 + (np.quantile(k, [0.025, 0.975]) - 0.1) * 32 + 0.01 * row.S
        assert row.interval_ms == pytest.approx(ends)
