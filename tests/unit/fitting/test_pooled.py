"""Rows of several systems are told by the label that separates them, on planted machines."""

import numpy as np

from latfit.fitting.checking.contradictions import pooled_systems
from latfit.fitting.data import fit_data
from latfit.trace import Trace

RNG_SEEDS = range(200)


def planted(factors: dict[str, float], rng: np.random.Generator, n: int = 300, **more: object) -> Trace:
    """Steps on machines whose times differ by a factor, on a grid of sizes that all of them ran."""
    B = rng.choice([1, 2, 4, 8, 16, 32], n)
    S = B * rng.choice([1, 8, 64], n)
    device = rng.choice(list(factors), n)
    factor = np.array([factors[name] for name in device])
    T = factor * (5 + 0.05 * S) * np.exp(0.03 * rng.standard_normal(n))
    columns = {"B": B, "S": S, "T_ms": T, "device": device.astype(object)}
    return Trace({**columns, **{name: np.asarray(column) for name, column in more.items()}})


def test_the_label_that_separates_machines_is_named_with_its_command() -> None:
    rng = np.random.default_rng(0)
    trace = planted({"a100": 2.0, "h100": 1.0, "l4": 6.0}, rng, note=rng.choice(["x", "y"], 300))
    found = pooled_systems(trace, fit_data(trace))
    assert found is not None
    assert "device (3 values, h100 to l4)" in found.message
    assert "--map path=device" in found.remedy


def test_labels_that_say_nothing_are_left_alone() -> None:
    """One machine under many labels: at most one false name in 200 draws."""
    named = 0
    for seed in RNG_SEEDS:
        rng = np.random.default_rng(seed)
        trace = planted({"a": 1.0}, rng, n=60, host=rng.choice(list("pqrs"), 60), tp_size=rng.choice([1, 2], 60))
        named += pooled_systems(trace, fit_data(trace)) is not None
    assert named <= 1
