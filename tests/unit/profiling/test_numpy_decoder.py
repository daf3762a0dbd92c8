"""The NumPy kernels compute a real decoder: they agree with the plain reference whatever the step is made of.

Tolerance: float32 rounds at 6e-8; a step is a chain of about 20 products of length up to 64 for each layer, and logits
are sums of 48 numbers of order one, so errors stay around 1e-5. A wrong mask, position or cache slot changes logits by
order one.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from numpy.typing import NDArray

from latfit.profiling.devices.numpy_step import (
    QUERY_ROWS,
    DecoderStep,
    DecoderWeights,
    KvCache,
    gated,
    project,
    random_weights,
)
from latfit.profiling.shapes import ModelShape, StepShape
from tests.unit.profiling.decoder_reference import logits_of_prompt

SHAPES = {
    "grouped": ModelShape("grouped", 48, 2, 6, 2, 8, 64, 50),
    "one key head each": ModelShape("mha", 48, 2, 4, 4, 12, 40, 50),
    "one key head for all": ModelShape("mqa", 32, 1, 4, 1, 8, 24, 30),
}
ATOL = 2e-4


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def weights(request: pytest.FixtureRequest) -> DecoderWeights:
    return random_weights(request.param, seed=3)


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 30, length).tolist()
    return tokens


def empty(shape: ModelShape, *size: int) -> NDArray[np.float32]:
    return np.full((shape.layers, *size, shape.head_dim), np.nan, np.float32)


def run(weights: DecoderWeights, cell: StepShape, cache: KvCache, tokens: Sequence[int]) -> NDArray[np.float32]:
    return DecoderStep(weights, cell, cache, np.array(tokens)).run().copy()


def prefill_cache(weights: DecoderWeights, rooms: Sequence[int]) -> KvCache:
    """Caches for prefill requests of so many tokens, filled with NaN: a slot read before it is written shows."""
    shape = weights.shape
    none = empty(shape, 0, shape.kv_heads, 1)
    pairs = tuple((empty(shape, shape.kv_heads, room), empty(shape, shape.kv_heads, room)) for room in rooms)
    return KvCache(none, none, pairs)


def decode_cache(weights: DecoderWeights, prompts: Sequence[Sequence[int]]) -> KvCache:
    """A decode cache that holds each prompt, with room for one more token."""
    shape, context = weights.shape, len(prompts[0])
    size = (len(prompts), shape.kv_heads, context + 1)
    cache = KvCache(empty(shape, *size), empty(shape, *size))
    for slot, tokens in enumerate(prompts):
        single = prefill_cache(weights, [context])
        run(weights, StepShape(prefill=(context,)), single, tokens)
        keys, values = single.prefill[0]
        cache.decode_keys[:, slot, :, :context] = keys
        cache.decode_values[:, slot, :, :context] = values
    return cache


class TestPrefill:
    def test_agrees_with_the_reference(self, weights: DecoderWeights) -> None:
        tokens = prompt(11, seed=0)
        found = run(weights, StepShape(prefill=(11,)), prefill_cache(weights, [11]), tokens)
        np.testing.assert_allclose(found[0], logits_of_prompt(weights, tokens)[-1], atol=ATOL)

    def test_agrees_across_blocks_of_query_rows(self, weights: DecoderWeights) -> None:
        tokens = prompt(2 * QUERY_ROWS + 5, seed=1)
        cell = StepShape(prefill=(len(tokens),))
        found = run(weights, cell, prefill_cache(weights, [len(tokens)]), tokens)
        np.testing.assert_allclose(found[0], logits_of_prompt(weights, tokens)[-1], atol=ATOL)

    def test_several_prompts_do_not_see_each_other(self, weights: DecoderWeights) -> None:
        prompts = [prompt(n, seed=n) for n in (3, 9, 1)]
        cell = StepShape(prefill=(3, 9, 1))
        found = run(weights, cell, prefill_cache(weights, [3, 9, 1]), list(chain(*prompts)))
        wanted = [logits_of_prompt(weights, tokens)[-1] for tokens in prompts]
        np.testing.assert_allclose(found, wanted, atol=ATOL)

    def test_a_later_chunk_continues_the_first(self, weights: DecoderWeights) -> None:
        tokens = prompt(QUERY_ROWS + 20, seed=2)
        cache = prefill_cache(weights, [len(tokens)])
        run(weights, StepShape(prefill=(13,)), cache, tokens[:13])
        rest = StepShape(prefill=(len(tokens) - 13,), history=(13,))
        found = run(weights, rest, cache, tokens[13:])
        np.testing.assert_allclose(found[0], logits_of_prompt(weights, tokens)[-1], atol=ATOL)


class TestDecode:
    def test_token_by_token_is_prefill(self, weights: DecoderWeights) -> None:
        """Decoding a prompt from an empty cache, a token a step, gives the reference's logits at every token."""
        shape, tokens = weights.shape, prompt(9, seed=4)
        size = (1, shape.kv_heads, len(tokens))
        cache = KvCache(empty(shape, *size), empty(shape, *size))
        found = [run(weights, StepShape(1, position), cache, [token])[0] for position, token in enumerate(tokens)]
        np.testing.assert_allclose(found, logits_of_prompt(weights, tokens), atol=ATOL)

    @pytest.mark.parametrize("requests", [1, 2, 3, 8])
    def test_batched_requests_keep_their_own_context(self, weights: DecoderWeights, requests: int) -> None:
        prompts = [prompt(7, seed=10 + slot) for slot in range(requests)]
        new = prompt(requests, seed=5)
        found = run(weights, StepShape(requests, 7), decode_cache(weights, prompts), new)
        wanted = [logits_of_prompt(weights, [*old, token])[-1] for old, token in zip(prompts, new, strict=True)]
        np.testing.assert_allclose(found, wanted, atol=ATOL)

    def test_a_step_repeats_itself(self, weights: DecoderWeights) -> None:
        """Timing repeats one step: the second run must do the same work, not one token more."""
        step = DecoderStep(weights, StepShape(2, 5), decode_cache(weights, [prompt(5, 6)] * 2), np.array([1, 2]))
        first = step.run().copy()
        np.testing.assert_array_equal(step.run(), first)


def test_a_mixed_step_is_its_parts(weights: DecoderWeights) -> None:
    prompts = [prompt(6, seed=20 + slot) for slot in range(3)]
    new, chunks = prompt(3, seed=8), [prompt(5, seed=9), prompt(12, seed=10)]
    decode = decode_cache(weights, prompts)
    cache = KvCache(decode.decode_keys, decode.decode_values, prefill_cache(weights, [5, 12]).prefill)
    found = run(weights, StepShape(3, 6, (5, 12)), cache, [*new, *chunks[0], *chunks[1]])
    decoded = [logits_of_prompt(weights, [*old, token])[-1] for old, token in zip(prompts, new, strict=True)]
    prefilled = [logits_of_prompt(weights, tokens)[-1] for tokens in chunks]
    np.testing.assert_allclose(found, [*decoded, *prefilled], atol=ATOL)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_either_product_projects(rows: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((rows, 7)).astype(np.float32), rng.standard_normal((7, 4)).astype(np.float32)
    out = np.empty((rows, 4), np.float32)
    project(x, weight, out=out)
    np.testing.assert_allclose(out, x.astype(float) @ weight.astype(float), atol=1e-5)


def test_extreme_gates_neither_warn_nor_break() -> None:
    gate_up = np.array([[-1e4, 1e4, 2.0, 2.0]], np.float32)
    out = np.empty((1, 2), np.float32)
    gated(gate_up, out=out)
    np.testing.assert_array_equal(out, [[0.0, 2e4]])
