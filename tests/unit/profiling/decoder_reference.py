"""The decoder written down token by token in float64, as slowly and plainly as its definition."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.profiling.devices.decoder import EPS, Layer, Weights

Float64 = NDArray[np.float64]


def convert(weights: Weights, vector: Callable[[Any], Any], matrix: Callable[[Any], Any]) -> Weights:
    """The weights of another back-end; `matrix` takes weights as (out, in)."""
    layers = [
        Layer(
            vector(layer.attention_norm),
            matrix(layer.qkv.T),
            matrix(layer.out.T),
            vector(layer.mlp_norm),
            [(matrix(gate_up.T), matrix(down.T)) for gate_up, down in layer.mlps],
            None if layer.router is None else matrix(layer.router.T),
        )
        for layer in weights.layers
    ]
    embedding, norm = vector(weights.embedding), vector(weights.final_norm)
    return Weights(weights.shape, layers, norm, embedding, matrix(weights.embedding))


def logits_of_prompt(weights: Weights, tokens: list[int]) -> Float64:
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
            group = shape.heads // shape.kv_heads
            attended = [_attended(h // group, q, keys[number], values[number]) for h, q in enumerate(queries)]
            x = x + np.concatenate(attended) @ layer.out.astype(np.float64)
            x = x + mlp_of_token(layer, _norm(x, layer.mlp_norm), shape.active_experts)
        rows.append(weights.embedding.astype(np.float64) @ _norm(x, weights.final_norm))
    return np.array(rows)


def mlp_of_token(layer: Layer, x: Float64, active: int) -> Float64:
    """The gated MLP, or the `active` experts of highest score, weighted by the softmax of their scores."""
    if layer.router is None:
        return _gated(x, *layer.mlps[0])
    scores = x @ layer.router
    best = np.argsort(scores)[-active:]
    shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
    total: Float64 = sum(
        (share * _gated(x, *layer.mlps[expert]) for share, expert in zip(shares, best, strict=True)), np.zeros(len(x))
    )
    return total


def _gated(x: Float64, gate_up: Float64, down: Float64) -> Float64:
    gate, up = np.split(x @ gate_up.astype(np.float64), 2)
    return np.asarray((gate / (1 + np.exp(-gate)) * up) @ down.astype(np.float64))


def _attended(kv_head: int, query: Float64, keys: list[Float64], values: list[Float64]) -> Float64:
    scores = [float(query @ key[kv_head]) / math.sqrt(len(query)) for key in keys]
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    return np.asarray(sum(weight * value[kv_head] for weight, value in zip(weights, values, strict=True)))


def _norm(x: Float64, weight: NDArray[np.float32]) -> Float64:
    scaled: Float64 = x / math.sqrt(float(np.mean(x**2)) + EPS) * weight
    return scaled


def _rotated(head: Float64, position: int) -> Float64:
    """Pairs (i, i + half) are turned by position / 10000^(2 i / width), as complex numbers."""
    half = len(head) // 2
    angle = position * 10000.0 ** (-2 * np.arange(half) / len(head))
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])
