"""Scale step times of a measured system to an unmeasured one by the ratio of two rooflines; widen their limits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs
from scipy.special import ndtri

from latfit.catalogue.entry import KERNELS, STEPS, CatalogEntry, fit_of
from latfit.model import FitResult, HeldOutErrors
from latfit.stats import FloatArray

NEIGHBOUR_ERROR = 0.24
"""Mean error of the shipped systems with whole layers, each predicted from its nearest neighbour
(benchmarks/catalog.py)."""

GRID = 12  # values of B and of S at which two systems are compared


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

CONTEXTS = (64.0, 256.0, 1024.0)  # cached tokens of a request in the steps of a scaled system


def roofline_ms(gpu: Gpu, weights: float, tp: int, S: FloatArray) -> FloatArray:
    """Return the time (n,) to read the weights, or to compute S tokens (n,), on tp GPUs."""
    read = BYTES_PER_WEIGHT * weights / gpu.bandwidth
    return np.maximum(read, 2 * weights * S / gpu.flops) / tp


def ratio_of(source: CatalogEntry, gpu: str, weights: float, tp: int, S: FloatArray) -> FloatArray:
    """Return the ratio (n,) of step times on another system to a measured one."""
    assert source.weights is not None
    there = roofline_ms(GPUS[source.gpu], source.weights, source.tp, S)
    return roofline_ms(GPUS[gpu], weights, tp, S) / there


def nearest(entries: Mapping[str, CatalogEntry], gpu: str, model: str, weights: float, tp: int) -> CatalogEntry | None:
    """Return the neighbour of a system with the nearest mean roofline."""

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
    return min(near, key=distance, default=None)


def scaled_steps(source: CatalogEntry, gpu: str, weights: float, tp: int) -> dict[str, FloatArray]:
    """Return steps (n,) of another system, over a neighbour's ranges."""
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


TRANSFER = 0.2
"""Mean error of the only pair at hand: one-second windows of vLLM on an RTX 4090, predicted by the entry of that GPU
and model, which another machine measured (19 %, docs/how-to/start-without-measuring.md)."""

MEAN_TO_SD = math.sqrt(math.pi / 2)  # standard deviation of a normal variable over its mean absolute value


def widen(fit: FitResult, error: float) -> FitResult:
    """Return a fit whose limits and errors include a mean error of its times."""
    sd, tested = MEAN_TO_SD * math.log1p(error), fit.cross_validation
    if tested.errors is not None:
        tested = structs.replace(tested, errors=_add(tested.errors, error))
    wider, draws = _widen_limits(fit.intervals, sd), _scale_draws(fit, sd)
    diagnostics = structs.replace(fit.diagnostics, lack_of_fit=None)
    return structs.replace(
        fit, intervals=wider, draws=draws, cross_validation=tested, baselines={}, diagnostics=diagnostics
    )


def scale_times(fit: FitResult, names: tuple[str, ...], values: FloatArray, factors: FloatArray) -> FloatArray:
    """Return parameter vectors (n, k) for times multiplied by factors (n,)."""
    kept = {*fit.structure.outer, "w_0", "w_1"}  # shapes, and work whose rate is P_max
    power = np.array([-1.0 if name == "P_max" else float(name not in kept) for name in names])
    return np.asarray(values * factors[:, None] ** power)


def _scale_draws(fit: FitResult, sd: float) -> Mapping[str, Any]:
    if not fit.draws:
        return fit.draws
    names, values = tuple(fit.draws["parameters"]), np.asarray(fit.draws["values"], dtype=np.float64)
    missing = [p.name for p in fit.structure.parameters if p.name not in names and p.fixed is None]
    names = (*names, *missing)
    columns = [p.name for p in fit.structure.parameters]
    same = np.tile([fit.theta[columns.index(name)] for name in missing], (len(values), 1))
    n = len(values)
    factors = np.exp(sd * ndtri((np.random.default_rng(0).permutation(n) + 0.5) / n))
    whole = np.hstack([values, same]) if missing else values
    return {**fit.draws, "parameters": list(names), "values": scale_times(fit, names, whole, factors).tolist()}


def _widen_limits(entry: Mapping[str, Any], sd: float) -> dict[str, Any]:
    def widen_limit(level: str, factor: float | None) -> float | None:
        if factor is None:
            return None
        return math.exp(math.copysign(math.hypot(math.log(factor), sd * float(ndtri(float(level)))), math.log(factor)))

    sides = {side: entry[side] for side in ("ratio_quantiles", "lower_quantiles") if side in entry}
    wider: dict[str, Any] = {
        side: {level: widen_limit(level, each) for level, each in limits.items()} for side, limits in sides.items()
    }
    if "by_phase" in entry:
        wider["by_phase"] = {phase: _widen_limits(each, sd) for phase, each in entry["by_phase"].items()}
    if "by_batch" in entry:
        wider["by_batch"] = [_widen_limits(each, sd) for each in entry["by_batch"]]
    return {**entry, **wider}


def _add(errors: HeldOutErrors, error: float) -> HeldOutErrors:
    pct = 100 * error
    by_phase = {phase: math.hypot(each, pct) for phase, each in (errors.by_phase or {}).items()}
    whole = {name: math.hypot(getattr(errors, name), pct) for name in ("mape_pct", "median_ape_pct", "mape_pct_mean")}
    return structs.replace(errors, by_phase=by_phase or None, **whole)
