"""The decoder written down token by token in float64, as slowly and plainly as its definition."""

import math

import numpy as np
from numpy.typing import NDArray

from latfit.profiling.devices.numpy_step import EPS, DecoderWeights

Float64 = NDArray[np.float64]


def logits_of_prompt(weights: DecoderWeights, tokens: list[int]) -> Float64:
    """Logits (tokens, vocab) after each token of one request, computed with a cache that grows by one token a time."""
    shape = weights.shape
    keys: list[list[Float64]] = [[] for _ in range(shape.layers)]
    values: list[list[Float64]] = [[] for _ in range(shape.layers)]
    rows = []
    for position, token in enumerate(tokens):
        x = weights.embedding[token].astype(np.float64)
        for number, layer in enumerate(weights.layers):
            mixed = _norm(x, layer.attention_norm) @ layer.qkv.astype(np.float64)
            heads = mixed.reshape(shape.heads + 2 * shape.kv_heads, shape.head_dim)
            queries = [_rotated(head, position) for head in heads[: shape.heads]]
            keys[number].append(
                np.array([_rotated(head, position) for head in heads[shape.heads : shape.heads + shape.kv_heads]])
            )
            values[number].append(heads[shape.heads + shape.kv_heads :].copy())
            attended = [
                _attended(shape.heads // shape.kv_heads, h, q, keys[number], values[number])
                for h, q in enumerate(queries)
            ]
            x = x + np.concatenate(attended) @ layer.out.astype(np.float64)
            both = _norm(x, layer.mlp_norm) @ layer.gate_up.astype(np.float64)
            gate, up = both[: shape.intermediate], both[shape.intermediate :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.astype(np.float64)
        rows.append(weights.embedding.astype(np.float64) @ _norm(x, weights.final_norm))
    return np.array(rows)


def _attended(group: int, head: int, query: Float64, keys: list[Float64], values: list[Float64]) -> Float64:
    scores = [float(query @ key[head // group]) / math.sqrt(len(query)) for key in keys]
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    total = np.zeros(len(query))
    for weight, value in zip(weights, values, strict=True):
        total += weight * value[head // group]
    return total


def _norm(x: Float64, weight: NDArray[np.float32]) -> Float64:
    scaled: Float64 = x / math.sqrt(float(np.mean(x**2)) + EPS) * weight
    return scaled


def _rotated(head: Float64, position: int) -> Float64:
    """Pairs (i, i + half) are turned by position / 10000^(2 i / width), as complex numbers."""
    half = len(head) // 2
    angle = position * 10000.0 ** (-2 * np.arange(half) / len(head))
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])
