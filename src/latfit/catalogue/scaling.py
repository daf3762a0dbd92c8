"""A system that nobody measured, from a neighbour: the same model on another GPU, or another model on the same GPU.

Times of the neighbour's fit are multiplied by the ratio of two rooflines, step by step, and fitted again. The roofline
of a step is what reading the weights takes, or computing its tokens, whichever is longer. The error of such a scaling
is that of the catalogue's own systems, each predicted from its nearest neighbour.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from latfit.catalogue.entry import KERNELS, STEPS, CatalogEntry, fit_of
from latfit.errors import FitNotUsable
from latfit.stats import FloatArray

MAX_ERROR = 0.3
"""Mean error of scaled systems beyond which nothing is predicted."""

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
    """Return the neighbours of a system, those first whose roofline is nearest to its own in the mean."""

    def distance(entry: CatalogEntry) -> float:
        return float(np.abs(np.log(ratio_of(entry, gpu, weights, tp, np.geomspace(1, 4096, GRID)))).mean())

    # The same model, or whole layers of another model on the same GPU.
    known = [each for each in entries.values() if each.weights is not None and {each.gpu, gpu} <= set(GPUS)]
    found = [each for each in known if each.model == model or (each.gpu == gpu and each.contents in (KERNELS, STEPS))]
    return tuple(sorted(found, key=distance))


def left_out(entries: Mapping[str, CatalogEntry]) -> Iterator[tuple[CatalogEntry, CatalogEntry, float]]:
    """Yield (system, its nearest neighbour, mean error) of every system that has a neighbour of the same contents."""
    for entry in entries.values():
        if entry.weights is None:
            continue
        others = {name: each for name, each in entries.items() if each is not entry and each.contents == entry.contents}
        if found := nearest(others, entry.gpu, entry.model, entry.weights, entry.tp):
            yield entry, found[0], mean_error(found[0], entry)


def mean_error(source: CatalogEntry, target: CatalogEntry) -> float:
    """Return the mean error of a scaled neighbour against a system's own fit, over the ranges that both measured."""
    assert target.weights is not None
    own, other = fit_of(target), fit_of(source)
    B, S = _grid(source, target)
    scaled = other.latency_ms(B, S) * ratio_of(source, target.gpu, target.weights, target.tp, S)
    return float(np.abs(scaled / own.latency_ms(B, S) - 1).mean())


def _grid(*entries: CatalogEntry) -> tuple[FloatArray, FloatArray]:
    """Return steps (n,) within the ranges of all entries: decode, and one prompt beside it."""
    most_B, most_S = (min(getattr(each, axis)[1] for each in entries) for axis in ("B", "S"))
    B = np.unique(np.rint(np.geomspace(1, most_B, GRID)))
    S = np.unique(np.rint(np.geomspace(1, most_S, GRID)))
    pairs = np.array([(b, s) for b in B for s in (b, *S) if s >= b])
    return pairs[:, 0], pairs[:, 1]


def scaled_steps(source: CatalogEntry, gpu: str, weights: float, tp: int) -> dict[str, FloatArray]:
    """Return steps (n,) of another system as columns of a trace: a grid over the ranges of a measured neighbour."""
    fit = fit_of(source)
    B, S = _grid(source)
    prefills = S > B
    columns = {
        "prefill_requests": prefills.astype(float),
        "prefill_tokens": np.where(prefills, S - B + 1, 0.0),
    }
    cached = CONTEXTS if fit.reads_context else (0.0,)
    B, S = np.tile(B, len(cached)), np.tile(S, len(cached))
    columns = {name: np.tile(values, len(cached)) for name, values in columns.items()}
    if fit.reads_context:
        each = np.repeat(cached, len(B) // len(cached))
        columns["context_tokens"] = each * (B - columns["prefill_requests"])
    T = fit.latency_ms(B, S, **columns) * ratio_of(source, gpu, weights, tp, S)
    return {"B": B, "S": S, "T_ms": T, **columns}


def neighbour_error(entries: Mapping[str, CatalogEntry]) -> float:
    """Return the mean error of the systems with whole layers, left out in turn. Raises FitNotUsable without any."""
    found = [error for system, _, error in left_out(entries) if system.contents in (KERNELS, STEPS)]
    if not found:
        raise FitNotUsable("no system of the catalogue has a neighbour", remedy="Add fits: latfit catalog add FIT.")
    return math.fsum(found) / len(found)
