"""The roofline model: matrix products as a smooth maximum of memory and compute, tiles, attention, cache effects.

The terms: docs/theory/fitting.md#models.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from latfit.model.features import SOURCES, Features, decode_only
from latfit.model.formulas import TAU_0, TAU_A, TAU_B, TAU_K, TAU_L, TAU_M, TAU_N, TAU_S, TAU_Y, with_prefill
from latfit.model.term_model import Choice, Parameter, Separable, Term, shape, term
from latfit.stats import FloatArray


def pmax(x: FloatArray, y: FloatArray, p: float) -> FloatArray:
    top = np.maximum(x, y)
    return top * _root(1.0 + _power(np.minimum(x, y) / (top + (top <= 0)), p), p)


def pmax_slope(x: FloatArray, whole: FloatArray, p: float) -> FloatArray:
    ratio = x / (whole + (whole <= 0))
    return _power(ratio, p) / (ratio + (ratio <= 0))


def _power(x: FloatArray, p: float) -> FloatArray:
    """Return x^p; powers of two by squaring, ten times as fast."""
    while p >= 2.0:
        x, p = x * x, p / 2.0
    return x if p == 1.0 else x**p


def _root(x: FloatArray, p: float) -> FloatArray:
    """Return x^(1/p); for powers of two by square roots."""
    while p >= 2.0:
        x, p = np.sqrt(x), p / 2.0
    return x if p == 1.0 else x ** (1.0 / p)


def tiles(S: FloatArray, Q: float, rho: float) -> FloatArray:
    """Return tokens rounded up to tiles of Q, each rise a ramp over rho Q tokens; zero if Q is zero (no tiles)."""
    if Q <= 0.0:
        return 0.0 * S
    if rho <= 0.0:
        return Q * np.ceil(S / Q)
    k = np.floor(S / Q)
    return np.maximum(Q, Q * (k + np.minimum((S / Q - k) / rho, 1.0)))


def attention_work(A: FloatArray, m: FloatArray, KD: FloatArray, P_0: FloatArray, Q_s: FloatArray) -> FloatArray:
    return A / P_0 + m * KD / Q_s


def attention(
    A: FloatArray, m: FloatArray, KD: FloatArray, L: FloatArray, D: FloatArray, P_0: FloatArray, Q_s: FloatArray,
    p_A: float,
) -> FloatArray:  # fmt: skip
    """Return the smooth maximum of the attention work and the longest sequence (of decoding requests, the mean)."""
    longest = m * np.maximum(L, KD / np.maximum(D, 1.0))
    return pmax(longest, attention_work(A, m, KD, P_0, Q_s), p_A)


def _attention_slope(*columns: Any) -> FloatArray:
    A, m, KD, _, _, P_0, Q_s, p_A = columns
    return pmax_slope(attention_work(A, m, KD, P_0, Q_s), attention(*columns), p_A)


def _reads_cache(f: Features) -> bool:
    """Return whether prefill attends to varying cached tokens: only then L and W are distinguishable."""
    held = f["m"] > 0
    return bool(held.any()) and not decode_only(f) and float(np.ptp(f["KP"][held])) > 0


def _without_cache_reads(term: Term) -> Term:
    """Return the term for data in which L and W are not distinguishable."""
    return replace(term, when=lambda f: term.when(f) and not _reads_cache(f))


GEMM = term(
    "b",
    "ms/token",
    "cost of a token where computing is the limit",
    lambda S, S_0, p: pmax(S_0, S, p),
    with_prefill,
    S_0=lambda S, S_0, p: pmax_slope(S_0, pmax(S_0, S, p), p),
)
GEMM_OF_DECODE = term(
    "b_B",
    "ms/request",
    "cost of a request where computing is the limit, in steps that only decode",
    lambda B, S_0, p: pmax(S_0, B, p),
    decode_only,
    S_0=lambda B, S_0, p: pmax_slope(S_0, pmax(S_0, B, p), p),
)
LONG_STEP = term(
    "tau_H",
    "ms/token",
    "additional cost of a token beyond S_1",
    lambda S, S_1: np.maximum(S - S_1, 0.0),
    with_prefill,
    S_1=lambda S, S_1: -np.asarray(S > S_1, dtype=np.float64),
)
TILES = term("tau_Q", "ms/token", "cost of a token of a whole tile", lambda S, Q, rho: tiles(S, Q, rho), with_prefill)
MORE_TILES = term("tau_V", "ms/token", "cost of a token of a second tile", lambda S, V: tiles(S, V, 0.0), with_prefill)
LARGE_BATCH = term(
    "tau_C",
    "ms/request",
    "additional cost of a decoding request beyond B_1",
    lambda m, B, B_1: (1 - m) * np.maximum(B - B_1, 0.0),
    B_1=lambda m, B, B_1: -(1 - m) * (B > B_1),
)
ATTENTION = term(
    "c",
    "ms/token",
    "attention of a step with prefill, a token of its longest sequence",
    attention,
    _reads_cache,
    P_0=lambda A, m, KD, L, D, P_0, Q_s, p_A: -_attention_slope(A, m, KD, L, D, P_0, Q_s, p_A) * A / P_0**2,
    Q_s=lambda A, m, KD, L, D, P_0, Q_s, p_A: -_attention_slope(A, m, KD, L, D, P_0, Q_s, p_A) * m * KD / Q_s**2,
)
REREADING = term(
    "tau_X",
    "ms/(request^e_X token)",
    "reading a cached token beyond K_0 again",
    lambda m, D, KD, K_0, e_X: m * D**e_X * np.maximum(KD - K_0, 0.0),
    _reads_cache,
    K_0=lambda m, D, KD, K_0, e_X: -m * D**e_X * (KD > K_0),
)


def _span(name: str, low: float, high: float) -> Callable[[Features], tuple[float, float]]:
    """Return the range of a shape by the largest value of a feature; a low end below zero is a share of that value."""

    def span(f: Features) -> tuple[float, float]:
        top = max(float(f[name].max()), 1.0)
        start = low if low > 0 else -low * top
        return start, max(high * top, 4 * start)

    return span


SHARPNESS = (4.0, 2.0, 8.0)

TILE_LENGTHS = (32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 320.0, 384.0, 512.0, 576.0, 640.0, 768.0, 1024.0, 1280.0)
"""Tiles of 32 to 256 tokens, and multiples of the larger ones."""

ROOFLINE = Separable(
    "roofline",
    "T = tau_0 + tau_B*B + b*pmax(S_0, S) + b_B*pmax(S_0, B) + tau_S*S + tau_H*max(S-S_1, 0) + tau_Q*tile_Q(S)"
    " + tau_V*tile_V(S) + tau_K*(1-m)*KD + tau_C*(1-m)*max(B-B_1, 0) + c*pmax(L, W) + tau_L*m*KD + tau_A*A + tau_Y*m*D"
    " + tau_X*m*D^e_X*max(KD-K_0, 0) + tau_N*n + tau_M*m",
    (
        TAU_0,
        TAU_B,
        GEMM,
        GEMM_OF_DECODE,
        replace(TAU_S, when=with_prefill),
        TILES,
        MORE_TILES,
        TAU_K,
        ATTENTION,
        _without_cache_reads(TAU_L),
        _without_cache_reads(TAU_A),
        TAU_Y,
        REREADING,
        TAU_N,
        TAU_M,
        LARGE_BATCH,
        LONG_STEP,
    ),
    (
        shape(
            "S_0",
            "tokens",
            "tokens below which reading weights is the limit",
            lambda f: (max(0.5 * float(f["S"].min()), 0.5), 1.5 * float(f["S"].max())),
        ),
        shape("S_1", "tokens", "tokens from which a step counts as long", _span("S", -1 / 32, 2 / 3)),
        shape("P_0", "tokens", "prompt tokens that saturate the hardware", _span("P", 1.0, 4.0)),
        shape("Q_s", "requests", "decoding requests that saturate the hardware", _span("B", 0.25, 4.0)),
        shape("K_0", "tokens", "cached tokens that stay in the second-level cache", _span("KD", -1e-3, 1.0)),
        shape("B_1", "requests", "decoding requests from which a step counts as large", _span("B", -1 / 32, 5 / 6)),
    ),
    (
        Choice(Parameter("p", "1", "sharpness of the matrix products' corner", positive=True, fixed=4.0), SHARPNESS),
        Choice(Parameter("p_A", "1", "sharpness of attention's corner", positive=True, fixed=4.0), SHARPNESS),
        Choice(Parameter("e_X", "1", "power of the requests; 1 in older files", positive=True, fixed=1.0), (0.5,)),
        Choice(Parameter("Q", "tokens", "length of a tile; 0 for none", fixed=0.0), (0.0, *TILE_LENGTHS)),
        Choice(Parameter("rho", "1", "share of a tile over which its cost rises", fixed=0.0), (0.0, 1 / 16)),
        Choice(Parameter("V", "tokens", "length of a second tile; 0 for none", fixed=0.0), (0.0, *TILE_LENGTHS)),
    ),
    columns=SOURCES,
)
