"""A system that nobody measured, from a neighbour: the same model on another GPU, or another model on the same GPU.

The neighbour's times are multiplied by the ratio of two rooflines, step by step, and fitted again. The roofline of a
step is the longer of reading the weights and computing its tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from latfit.catalogue.entry import KERNELS, STEPS, CatalogEntry, fit_of
from latfit.stats import FloatArray

NEIGHBOUR_ERROR = 0.24
"""Mean error of the shipped systems with whole layers, each predicted from its nearest neighbour
(benchmarks/catalog.py)."""

GRID = 12
"""Values of B and of S at which two systems are compared."""


@dataclass(frozen=True)
class Gpu:
    """Published peak of one GPU: memory bandwidth in bytes/ms, dense bf16 FLOP/ms."""

    bandwidth: float
    flops: float


GPUS: Mapping[str, Gpu] = {
    "a40": Gpu(696e6, 149.7e9),
    "a100-80gb": Gpu(2039e6, 312e9),
    "rtx4090": Gpu(1008e6, 165.2e9),
    "h100": Gpu(3350e6, 989e9),
    "h200": Gpu(4800e6, 989e9),
}
"""NVIDIA's data sheets; SXM versions of A100, H100 and H200."""

BYTES_PER_WEIGHT = 2.0

CONTEXTS = (64.0, 256.0, 1024.0)
"""Cached tokens of a request in the steps of a scaled system."""


def roofline_ms(gpu: Gpu, weights: float, tp: int, S: FloatArray) -> FloatArray:
    """Return the time (n,) to read the weights once, or to compute S tokens (n,), on each of tp GPUs."""
    read = BYTES_PER_WEIGHT * weights / gpu.bandwidth
    return np.maximum(read, 2 * weights * S / gpu.flops) / tp


def ratio_of(source: CatalogEntry, gpu: str, weights: float, tp: int, S: FloatArray) -> FloatArray:
    """Return the ratio (n,) of a step's time on another system to that on a measured one."""
    assert source.weights is not None
    there = roofline_ms(GPUS[source.gpu], source.weights, source.tp, S)
    return roofline_ms(GPUS[gpu], weights, tp, S) / there


def nearest(
    entries: Mapping[str, CatalogEntry], gpu: str, model: str, weights: float, tp: int
) -> tuple[CatalogEntry, ...]:
    """Return the neighbours of a system, nearest mean roofline first."""

    def distance(entry: CatalogEntry) -> float:
        return float(np.abs(np.log(ratio_of(entry, gpu, weights, tp, np.geomspace(1, 4096, GRID)))).mean())

    # The same model, or whole layers of another model on the same GPU.
    near = [
        each
        for each in entries.values()
        if each.weights is not None
        and {each.gpu, gpu} <= set(GPUS)
        and (each.model == model or (each.gpu == gpu and each.contents in (KERNELS, STEPS)))
    ]
    return tuple(sorted(near, key=distance))


def scaled_steps(source: CatalogEntry, gpu: str, weights: float, tp: int) -> dict[str, FloatArray]:
    """Return steps (n,) of another system as columns of a trace, over the ranges of a neighbour."""
    fit = fit_of(source)
    sizes = {axis: np.unique(np.rint(np.geomspace(1, getattr(source, axis)[1], GRID))) for axis in ("B", "S")}
    B, S = np.array([(b, s) for b in sizes["B"] for s in (b, *sizes["S"]) if s >= b]).T
    prefills = S > B
    columns = {"prefill_requests": prefills.astype(float), "prefill_tokens": np.where(prefills, S - B + 1, 0.0)}
    cached = CONTEXTS if fit.reads_context else (0.0,)
    B, S = np.tile(B, len(cached)), np.tile(S, len(cached))
    columns = {name: np.tile(values, len(cached)) for name, values in columns.items()}
    if fit.reads_context:
        each = np.repeat(cached, len(B) // len(cached))
        columns["context_tokens"] = each * (B - columns["prefill_requests"])
    T = fit.latency_ms(B, S, **columns) * ratio_of(source, gpu, weights, tp, S)
    return {"B": B, "S": S, "T_ms": T, **columns}
