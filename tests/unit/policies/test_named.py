"""Policies by name: defaults that follow from the paths' times, and what cannot work refused."""

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.policies.policy import (
    POLICIES,
    DispatchTable,
    PathTimes,
    Settings,
    default_batch,
    default_threshold,
    named_policy,
)
from latfit.stats import FloatArray

B = np.arange(1.0, 65)
TIMES = PathTimes(8 + 0.05 * B, 2 * B[:16])


def solve(rate: float, T_ms: FloatArray) -> DispatchTable:
    return DispatchTable((0, 0, 2, 3, 4), rate, len(T_ms))


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_its_policy(name: str) -> None:
    made = named_policy(name, 0.5, TIMES, solve=solve)
    assert made.name == name
    assert made.needs_side == POLICIES[name].needs_side
    assert made.main_largest <= 64


def test_fixed_batch_carries_the_rate_at_80_percent() -> None:
    """b/(8 + .05 b) >= .5/.8 from b = 5.16 on."""
    assert default_batch(0.5, TIMES) == 6
    assert default_batch(1000.0, TIMES) == 64
    assert default_batch(0.5, PathTimes(TIMES.main, servers=2)) == 3
    assert named_policy("fixed", 0.5, TIMES).settings == {"batch": 6}
    assert named_policy("fixed", 0.5, TIMES, Settings(batch=9)).settings == {"batch": 9}


def test_threshold_is_where_the_main_path_is_as_fast() -> None:
    """2 B against 8 + .05 B: the root is 4.10256."""
    assert default_threshold(TIMES) == 5
    assert default_threshold(PathTimes(8 + 0.05 * B, np.array([1.0, 2.0]))) == 3


def test_a_cutoff_lasts_a_batch() -> None:
    """b = rate (8 + .05 b): 4.1 at 0.5/ms, so 5; 40 at 4/ms; none below 1; the largest where no batch is enough."""
    assert named_policy("cutoff", 0.5, TIMES).settings["t_cut_ms"] == pytest.approx(8.25)
    assert named_policy("three-stage", 0.5, TIMES).settings == {"B1": 5, "t_cut_ms": pytest.approx(8.25)}
    assert named_policy("cutoff", 4.0, TIMES).settings["t_cut_ms"] == pytest.approx(10.0)
    assert named_policy("cutoff", 0.01, TIMES).settings["t_cut_ms"] == pytest.approx(8.05)
    assert named_policy("cutoff", 100.0, TIMES).settings["t_cut_ms"] == pytest.approx(8 + 0.05 * 64)


@pytest.mark.parametrize("name", [name for name, each in POLICIES.items() if each.needs_side])
def test_two_paths_are_needed(name: str) -> None:
    with pytest.raises(WrongUsage, match="two execution paths"):
        named_policy(name, 0.5, PathTimes(TIMES.main))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("greedy", Settings()),
        ("fixed", Settings(batch=65)),
        ("gpu-only", Settings(max_batch=65)),
        ("window", Settings(window_ms=-1.0)),
        ("cutoff", Settings(t_cut_ms=0.0)),
        ("three-stage", Settings(B1=0)),
        ("marginal-cost", Settings(rule="greedy")),
        ("gpu-only", Settings(ageing_ms=0.0)),
        ("optimal", Settings()),
    ],
)
def test_refused(name: str, settings: Settings) -> None:
    with pytest.raises(WrongUsage):
        named_policy(name, 0.5, TIMES, settings)
