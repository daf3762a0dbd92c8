"""The mixture of experts against its definition, written down token by token."""

import numpy as np
import pytest

from latfit.profiling.devices.numpy_step import GatedMlp, route
from latfit.profiling.shapes import ModelShape

SHAPE = ModelShape("moe", 24, 1, 4, 2, 8, 16, 32, experts=5, active_experts=2)


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = ((5, 24, 32), (5, 16, 24), (24, 5))
    gate_up, down, router = ((rng.standard_normal(size) / 4).astype(np.float32) for size in sizes)
    return gate_up, down, router


@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_each_token_passes_the_experts_that_score_highest(tokens: int) -> None:
    gate_up, down, router = weights()
    x = np.random.default_rng(1).standard_normal((tokens, 24)).astype(np.float32)
    out = np.empty_like(x)
    GatedMlp(SHAPE, tokens).run(x, (gate_up, down), router, out)
    for row, found in zip(x.astype(np.float64), out, strict=True):
        scores = row @ router
        best = np.argsort(scores)[-2:]
        shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
        wanted = np.zeros(24)
        for share, expert in zip(shares, best, strict=True):
            gate, up = np.split(row @ gate_up[expert], 2)
            wanted += share * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_shares_add_up_to_one() -> None:
    chosen, shares = route(np.random.default_rng(2).standard_normal((40, 5)).astype(np.float32), 2)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-6)
    assert all(len(set(row)) == 2 for row in chosen.tolist())
