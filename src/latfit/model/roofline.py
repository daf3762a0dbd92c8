"""The roofline model: matrix products as a smooth maximum of memory and compute, tiles, attention, cache effects.

The terms and their meaning: docs/theory/fitting.md#models.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from latfit.model.base import Parameter
from latfit.model.baselines import TAU_0, TAU_A, TAU_B, TAU_S
from latfit.model.context import TAU_K, TAU_L, TAU_M, TAU_N, TAU_Y, with_prefill
from latfit.model.features import SOURCES, Features, decode_only
from latfit.model.term_model import Choice, Separable, Shape, Shapes, Term
from latfit.stats import FloatArray


def pmax(x: FloatArray | float, y: FloatArray, p: float) -> FloatArray:
    """Return the smooth maximum (n,)."""
    top = np.maximum(x, y)
    safe = np.where(top > 0, top, 1.0)
    return np.asarray(top * _root(1.0 + _power(np.minimum(x, y) / safe, p), p))


def pmax_slope(x: FloatArray | float, whole: FloatArray, p: float) -> FloatArray:
    """Return d pmax / dx (n,), where `whole` is pmax."""
    return _power(x / np.where(whole > 0, whole, 1.0), p - 1.0)


def _power(x: FloatArray, p: float) -> FloatArray:
    """Return x^p, by products if p is a small whole number: a tenth of the time."""
    if p not in range(1, 9):
        return np.asarray(x**p)
    found = x
    for bit in bin(int(p))[3:]:
        found = found * found * x if bit == "1" else found * found
    return np.asarray(found)


def _root(x: FloatArray, p: float) -> FloatArray:
    """Return x^(1/p), by square roots if p is 2, 4 or 8."""
    if p not in (2.0, 4.0, 8.0):
        return np.asarray(x ** (1.0 / p))
    for _ in range(int(p).bit_length() - 1):
        x = np.sqrt(x)
    return x


def tiles(S: FloatArray, Q: float, rho: float) -> FloatArray:
    """Return tokens rounded up to tiles of Q, with a riser of rho Q; zero if Q is zero (no tiles)."""
    if Q <= 0:
        return np.zeros_like(S)
    if rho <= 0:
        return np.asarray(Q * np.ceil(S / Q))
    k = np.floor(S / Q)
    return np.asarray(np.maximum(Q, Q * (k + np.minimum((S / Q - k) / rho, 1.0))))


def _longest(f: Features) -> FloatArray:
    """Return the tokens of the longest sequence in a step with prefill, decoding ones by their mean; else zero."""
    return np.asarray(f["m"] * np.maximum(f["L"], f["KD"] / np.maximum(f["D"], 1.0)))


def _work(f: Features, s: Shapes) -> FloatArray:
    return np.asarray(f["A"] / s["P_0"] + f["m"] * f["KD"] / s["Q_s"])


def _attention(f: Features, s: Shapes) -> FloatArray:
    return pmax(_longest(f), _work(f, s), s["p_A"])


def _attention_slope(f: Features, s: Shapes) -> FloatArray:
    """Return d pmax(L, W) / dW."""
    return pmax_slope(_work(f, s), _attention(f, s), s["p_A"])


def _reads_cache(f: Features) -> bool:
    """Return whether prefill attends to varying cached tokens: only then L and W are distinguishable."""
    held = f["m"] > 0
    return bool(held.any()) and not decode_only(f) and float(np.ptp(f["KP"][held])) > 0


def _plainly(term: Term) -> Term:
    """Return the term for data in which L and W are not distinguishable."""
    return replace(term, when=lambda f: term.when(f) and not _reads_cache(f))


GEMM = Term(
    Parameter("b", "ms/token", "cost of a token where computing is the limit"),
    lambda f, s: pmax(s["S_0"], f["S"], s["p"]),
    {"S_0": lambda f, s: pmax_slope(s["S_0"], pmax(s["S_0"], f["S"], s["p"]), s["p"])},
    when=with_prefill,
)
GEMM_OF_DECODE = Term(
    Parameter("b_B", "ms/request", "cost of a request where computing is the limit, in steps that only decode"),
    lambda f, s: pmax(s["S_0"], f["B"], s["p"]),
    {"S_0": lambda f, s: pmax_slope(s["S_0"], pmax(s["S_0"], f["B"], s["p"]), s["p"])},
    when=decode_only,
)
LONG = Term(
    Parameter("tau_H", "ms/token", "additional cost of a token beyond S_1"),
    lambda f, s: np.maximum(f["S"] - s["S_1"], 0.0),
    {"S_1": lambda f, s: -(f["S"] > s["S_1"]).astype(np.float64)},
    when=with_prefill,
)
TILES = Term(
    Parameter("tau_Q", "ms/token", "cost of a token of a whole tile"),
    lambda f, s: tiles(f["S"], s["Q"], s["rho"]),
    when=with_prefill,
)
WAVES = Term(
    Parameter("tau_V", "ms/token", "cost of a token of a whole longer tile"),
    lambda f, s: tiles(f["S"], s["V"], 0.0),
    when=with_prefill,
)
LARGE = Term(
    Parameter("tau_C", "ms/request", "additional cost of a decoding request beyond B_1"),
    lambda f, s: (1 - f["m"]) * np.maximum(f["B"] - s["B_1"], 0.0),
    {"B_1": lambda f, s: -(1 - f["m"]) * (f["B"] > s["B_1"])},
)
ATTENTION = Term(
    Parameter("c", "ms/token", "attention of a step with prefill, a token of its longest sequence"),
    _attention,
    {
        "P_0": lambda f, s: -_attention_slope(f, s) * f["A"] / s["P_0"] ** 2,
        "Q_s": lambda f, s: -_attention_slope(f, s) * f["m"] * f["KD"] / s["Q_s"] ** 2,
    },
    when=_reads_cache,
)
CLIFF = Term(
    Parameter("tau_X", "ms/(request token)", "cached token beyond K_0, read again for every decoding request"),
    lambda f, s: f["m"] * f["D"] * np.maximum(f["KD"] - s["K_0"], 0.0),
    {"K_0": lambda f, s: -f["m"] * f["D"] * (f["KD"] > s["K_0"])},
    when=_reads_cache,
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
    " + tau_X*m*D*max(KD-K_0, 0) + tau_N*n + tau_M*m",
    (
        TAU_0,
        TAU_B,
        GEMM,
        GEMM_OF_DECODE,
        replace(TAU_S, when=with_prefill),
        TILES,
        WAVES,
        TAU_K,
        ATTENTION,
        _plainly(TAU_L),
        _plainly(TAU_A),
        TAU_Y,
        CLIFF,
        TAU_N,
        TAU_M,
        LARGE,
        LONG,
    ),
    (
        Shape(
            Parameter("S_0", "tokens", "tokens below which reading weights is the limit", positive=True),
            lambda f: (max(0.5 * float(f["S"].min()), 0.5), 1.5 * float(f["S"].max())),
        ),
        Shape(
            Parameter("S_1", "tokens", "tokens from which a step counts as long", positive=True),
            _span("S", -1 / 32, 2 / 3),
        ),
        Shape(
            Parameter("P_0", "tokens", "prompt tokens that saturate the hardware", positive=True), _span("P", 1.0, 4.0)
        ),
        Shape(
            Parameter("Q_s", "requests", "decoding requests that saturate the hardware", positive=True),
            _span("B", 0.25, 4.0),
        ),
        Shape(
            Parameter("K_0", "tokens", "cached tokens that stay in the second-level cache", positive=True),
            _span("KD", -1e-3, 1.0),
        ),
        Shape(
            Parameter("B_1", "requests", "decoding requests from which a step counts as large", positive=True),
            _span("B", -1 / 32, 5 / 6),
        ),
    ),
    (
        Choice(Parameter("p", "1", "sharpness of the matrix products' corner", positive=True, fixed=4.0), SHARPNESS),
        Choice(Parameter("p_A", "1", "sharpness of attention's corner", positive=True, fixed=4.0), SHARPNESS),
        Choice(Parameter("Q", "tokens", "length of a tile; 0 for none", fixed=0.0), (0.0, *TILE_LENGTHS)),
        Choice(Parameter("rho", "1", "share of a tile over which its cost rises", fixed=0.0), (0.0, 1 / 16)),
        Choice(Parameter("V", "tokens", "length of a longer tile; 0 for none", fixed=0.0), (0.0, *TILE_LENGTHS)),
    ),
    columns=SOURCES,
)
