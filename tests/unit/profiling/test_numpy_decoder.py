"""The NumPy step computes a real decoder: it agrees with the plain reference whatever the step is made of.

Tolerance: float32 rounds at 6e-8; a step is a chain of about 20 products of length up to 64 for each layer, and logits
are sums of 48 numbers of order one, so errors stay around 1e-5. A wrong mask, position or cache slot changes logits by
order one.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from numpy.typing import NDArray

from latfit.profiling.devices.decoder import KvCache, Weights, make_cache
from latfit.profiling.devices.numpy_device import QUERY_ROWS, NumpyStep, random_weights
from latfit.profiling.shapes import ModelShape, StepShape
from tests.unit.profiling.decoder_reference import logits_of_prompt

SHAPES = {
    "grouped": ModelShape("grouped", 48, 2, 6, 2, 8, 64, 50),
    "one key head each": ModelShape("mha", 48, 2, 4, 4, 12, 40, 50),
    "one key head for all": ModelShape("mqa", 32, 1, 4, 1, 8, 24, 30),
    "experts": ModelShape("moe", 24, 2, 4, 2, 8, 16, 32, experts=5, active_experts=2),
}
ATOL = 2e-4


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def weights(request: pytest.FixtureRequest) -> Weights:
    return random_weights(request.param, seed=3)


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 30, length).tolist()
    return tokens


def empty(weights: Weights, cell: StepShape) -> KvCache:
    """A cache of NaN: a slot that is read before it is written shows."""
    return make_cache(weights.shape, cell, lambda size: np.full(size, np.nan, np.float32))


def run(weights: Weights, cell: StepShape, tokens: Sequence[int], cache: KvCache | None = None) -> NDArray[np.float32]:
    found: NDArray[np.float32] = NumpyStep(weights, cell, cache or empty(weights, cell)).run(np.array(tokens))
    return found


def filled(weights: Weights, cell: StepShape, prompts: Sequence[Sequence[int]]) -> KvCache:
    """The cache of a cell whose decode requests have these prompts in it."""
    cache = empty(weights, cell)
    for slot, tokens in enumerate(prompts):
        single = StepShape(prefill=(len(tokens),))
        one = empty(weights, single)
        run(weights, single, tokens, one)
        for half, whole in zip(one[0], cache[0], strict=True):
            whole[:, slot, :, : len(tokens)] = half[:, 0]
    return cache


def last(weights: Weights, tokens: list[int]) -> NDArray[np.float64]:
    return np.asarray(logits_of_prompt(weights, tokens)[-1])


@pytest.mark.parametrize("lengths", [(11,), (QUERY_ROWS + 5,), (3, 9, 1), (6, 6, 6)])
def test_prefill_agrees_with_the_reference(weights: Weights, lengths: tuple[int, ...]) -> None:
    """One chunk, also across blocks of query rows; several do not see each other, of different and of equal lengths."""
    prompts = [prompt(n, seed=n + slot) for slot, n in enumerate(lengths)]
    found = run(weights, StepShape(prefill=lengths), list(chain(*prompts)))
    np.testing.assert_allclose(found, [last(weights, tokens) for tokens in prompts], atol=ATOL)


def test_a_later_chunk_continues_the_first(weights: Weights) -> None:
    tokens = prompt(QUERY_ROWS + 20, seed=2)
    rest = StepShape(prefill=(len(tokens) - 13,), history=(13,))
    cache = empty(weights, rest)
    keys, values = (half[:, :, :, :13] for half in cache[0])
    run(weights, StepShape(prefill=(13,)), tokens[:13], [(keys, values)])
    np.testing.assert_allclose(run(weights, rest, tokens[13:], cache)[0], last(weights, tokens), atol=ATOL)


@pytest.mark.parametrize("requests", [1, 2, 3, 8])
def test_decode_requests_keep_their_own_context(weights: Weights, requests: int) -> None:
    prompts, new = [prompt(7, seed=10 + slot) for slot in range(requests)], prompt(requests, seed=5)
    cell = StepShape(requests, 7)
    found = run(weights, cell, new, filled(weights, cell, prompts))
    wanted = [last(weights, [*old, token]) for old, token in zip(prompts, new, strict=True)]
    np.testing.assert_allclose(found, wanted, atol=ATOL)


def test_a_mixed_step_is_its_parts(weights: Weights) -> None:
    prompts = [prompt(6, seed=20 + slot) for slot in range(3)]
    new, chunks = prompt(3, seed=8), [prompt(5, seed=9), prompt(12, seed=10)]
    cell = StepShape(3, 6, (5, 12))
    found = run(weights, cell, [*new, *chunks[0], *chunks[1]], filled(weights, cell, prompts))
    whole = [[*old, token] for old, token in zip(prompts, new, strict=True)] + chunks
    np.testing.assert_allclose(found, [last(weights, tokens) for tokens in whole], atol=ATOL)


def test_extreme_gates_neither_warn_nor_break(weights: Weights) -> None:
    step = NumpyStep(weights, StepShape(1), [])
    found = step.swiglu(np.array([[-1e4, 1e4, 2.0, 2.0]], np.float32))
    np.testing.assert_array_equal(found, [[0.0, 2e4]])
