"""Compute the cost of an engine step in compiled code, for every model family, with the noise of single steps.

All families are sums of the same terms (`latfit.model`), so one vector of coefficients covers them. A step lasts
typical cost × level of its size × noise of its phase and batch. Theory: docs/theory/simulation.md, "Step cost".
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import entry, inner, mixed, rare
from latfit.errors import FitNotUsable, WrongUsage
from latfit.model import (
    OF_PREFILL_ALONE,
    OF_STEPS,
    FitResult,
    NoiseTable,
    StepNoise,
    drawn_step_ms,
    noise_table,
)
from latfit.simulation.engine.state import State
from latfit.stats import FloatArray, IntArray
from latfit.trace import DECODE, MIXED, PERIOD, PREFILL


@inner
def uniform(seed: int, request: int, token: int, place: int) -> float:
    """Return a number in [0, 1) for one place of one draft: a splitmix64 hash of all four arguments."""
    x = np.uint64(seed)
    for part in (request, token, place):
        x = mixed(x + np.uint64(part) + np.uint64(0x9E3779B97F4A7C15))
    return float((x >> np.uint64(11)) * (1.0 / 9007199254740992.0))


@inner
def sequence(stream: NDArray[np.uint64]) -> float:
    """Return the next number in [0, 1) of a splitmix64 stream (1,)."""
    stream[0] += np.uint64(0x9E3779B97F4A7C15)
    return float((mixed(stream[0]) >> np.uint64(11)) * (1.0 / 9007199254740992.0))


@rare
def accepted(seed: int, request: int, token: int, drafted: int, rate: float) -> int:
    """Return the number of leading draft tokens accepted, each with probability `rate`."""
    for place in range(drafted):
        if uniform(seed, request, token, place) >= rate:
            return place
    return drafted


OF_DECODE, OF_PREFILL, OF_MIXED = range(3)  # phases, in the row order of `Scatter`

BATCHES = 1025
SIZE_SHIFT = 45  # low bits of a float64 dropped to number a size: 128 sizes an octave
SIZE_LOWEST = 1023 << (52 - SIZE_SHIFT)
SIZES = 24 << (52 - SIZE_SHIFT)  # sizes up to 2^24 tokens
_BELOW = (1 << SIZE_SHIFT) - 1
_OF_BELOW = 1.0 / (1 << SIZE_SHIFT)


class Scatter(NamedTuple):
    """Step noise by phase; `on` is false if no phase has noise."""

    level: FloatArray  # ratios to the typical cost (3, SIZES + 1) by phase and size
    noise: NoiseTable
    on: bool


def scatter_from(decode: StepNoise | None, prefill: StepNoise | None, mixed: StepNoise | None) -> Scatter:
    """Build the noise by phase; None makes a phase deterministic."""
    phases = (decode, prefill, mixed)
    bits = np.arange(SIZES + 1, dtype=np.int64) + SIZE_LOWEST << SIZE_SHIFT
    sizes = np.asarray(bits.view(np.float64))
    level = np.stack([np.ones(SIZES + 1) if each is None else each.levels.factors(sizes) for each in phases])
    return Scatter(level, noise_table(phases, BATCHES - 1), any(each is not None for each in phases))


NONE = scatter_from(None, None, None)


@inner
def phase_row(P: float, S: float) -> int:
    """Return the phase of a step with S tokens, P of them prefill."""
    return OF_DECODE if P <= 0.0 else OF_PREFILL if P >= S else OF_MIXED


@inner
def level_of(c: Scatter, phase: int, S: float) -> float:
    """Interpolate the level of steps of S >= 1 tokens: measured latency over typical cost."""
    if not c.on:
        return 1.0
    bits = np.float64(S).view(np.int64)
    place = (bits >> SIZE_SHIFT) - SIZE_LOWEST
    if place >= SIZES:
        return float(c.level[phase, SIZES])
    low = c.level[phase, place]
    return float(low + (bits & _BELOW) * _OF_BELOW * (c.level[phase, place + 1] - low))


@inner
def noise_group(c: Scatter, phase: int, B: float) -> int:
    """Return the noise group of a batch of B requests."""
    return int(c.noise.group[phase, min(int(B), BATCHES - 1)])


@inner
def noisy_ms(c: Scatter, s: State, group: int, T: float) -> float:
    """Draw the latency in ms of the next step from T, its typical cost times its level."""
    return float(drawn_step_ms(c.noise, group, T, sequence(s.stream))) if c.on else T


COEFFICIENTS = (
    "tau_0", "tau_B", "tau_S", "tau_Q", "Q", "rho", "tau_K", "tau_L", "tau_R", "tau_A", "tau_N", "tau_M", "tau_Y",
    "c", "P_0", "Q_s", "tau_X", "K_0", "tau_E", "k_E", "p", "b", "S_0", "b_hinge", "S_0_hinge",
    "w_0", "w_1", "k_B", "k_S", "gamma_B", "gamma_S",
    "tau_H", "S_1", "tau_V", "V", "tau_C", "B_1", "b_B", "p_A",
)  # fmt: skip
"""Parameters of all models (`latfit.model`) in the order of the coefficients; w_0 and w_1 are over P_max."""

TAU_0, TAU_B, TAU_S, TAU_Q, Q, RHO, TAU_K, TAU_L, TAU_R, TAU_A, TAU_N, TAU_M, TAU_Y = range(13)
ATTENTION, P_0, Q_S, TAU_X, K_0, TAU_E, K_E, P_NORM, GEMM, GEMM_S0, HINGE, HINGE_S0 = range(13, 25)
SAT_W0, SAT_W1, SAT_KB, SAT_KS, GAMMA_B, GAMMA_S = range(25, 31)
TAU_H, S_1, TAU_V, V, TAU_C, B_1, GEMM_B, P_ATTENTION = range(31, 39)
WIDTH = 39  # number of coefficients

LINEAR = [i for i, name in enumerate(COEFFICIENTS) if name.startswith(("tau_", "w_", "b")) or name == "c"]
"""Coefficients that the cost is linear in."""


class Work(NamedTuple):
    """Features of a step; p tokens of a chunk are computed behind k cached ones."""

    B: float  # requests
    S: float  # tokens
    n: float  # requests that prefill
    P: float  # tokens that they compute
    KP: float  # cached tokens before these
    KD: float  # cached tokens that decoding attends to
    A: float  # attention work of prefill, Σ p(k + p/2) over chunks
    L: float  # longest sequence, max(k + p) over chunks


PREFILL_ALONE = 2  # row of the correction table for steps with prefill only


class Table(NamedTuple):
    """Smooth corrections (`model.correction`) of decode steps, mixed steps and prefill-only steps, a row each."""

    counts: IntArray  # nodes on each axis (3, 4); 0 if the table lacks the axis
    nodes: FloatArray  # node positions (3, 4, k), padded
    values: FloatArray  # log factors (3, m) in axis order; m = 0 if no fit has a correction


class StepCosts(NamedTuple):
    """Step costs of an engine."""

    typical: FloatArray  # coefficients (2, WIDTH) of decode steps and of steps with prefill
    scatter: Scatter = NONE  # noise of single steps
    table: Table = Table(np.zeros((3, 4), dtype=np.int64), np.zeros((3, 4, 0)), np.zeros((3, 0)))  # smooth corrections
    # Host time (3,) by phase at the end of a step, after its tokens appear; see `loop`
    host_ms: FloatArray = np.zeros(3)


def step_costs(fit: FitResult, with_prefill: FitResult | None = None, *, scatter: bool = True) -> StepCosts:
    """Make step costs from one fit, or from a decode fit and a fit of steps with prefill.

    scatter: whether single steps vary as the measured steps of their phase did. Raises FitNotUsable, WrongUsage.
    """
    fits = {DECODE: fit, PREFILL: with_prefill or fit, MIXED: with_prefill or fit}
    typical = np.stack([_coefficients(fits[DECODE]), _coefficients(fits[MIXED])])
    noise = scatter_from(*(each.step_noise(phase) for phase, each in fits.items())) if scatter else NONE
    host = [_host_ms(each, phase) for phase, each in fits.items()]
    return StepCosts(typical, noise, _table(fits[DECODE], fits[MIXED]), AFTER_TOKENS * np.array(host))


AFTER_TOKENS = 0.5  # share of the host time after a step's tokens appear; records do not show it


def _host_ms(fit: FitResult, phase: str) -> float:
    """Return the mean period minus the mean step time; 0 if the fit uses no periods or its file lacks these means."""
    try:
        means = fit.data.more["host"][phase]
        gap = float(means["period_ms"] - means["T_ms"]) if fit.data.more["time"] == PERIOD else 0.0
    except (LookupError, TypeError):
        return 0.0
    return gap if 0.0 < gap < np.inf else 0.0


def _table(decode: FitResult, with_prefill: FitResult) -> Table:
    """Build the correction table of a decode fit and of a fit of steps with prefill."""
    several = with_prefill.correction
    found = [decode.correction, several, several and several.alone]
    # The table of prefill-only steps has requests in prefill on its first axis.
    axes = [OF_STEPS, OF_STEPS, (OF_PREFILL_ALONE[0], *OF_STEPS[1:])]
    rows = [[each.nodes.get(name, ()) if each else () for name in axes[i]] for i, each in enumerate(found)]
    counts = np.array([[len(nodes) for nodes in row] for row in rows])
    nodes = np.zeros((*counts.shape, int(counts.max())))
    values = np.zeros((len(found), max(each.values.size if each else 0 for each in found)))
    for i, each in enumerate(found):
        for axis, places in enumerate(rows[i]):
            nodes[i, axis, : len(places)] = places
        if each is not None:
            values[i, : each.values.size] = each.values.ravel()
    return Table(counts, nodes, values)


def linear_costs(tau_0: float, tau_B: float, tau_S: float) -> StepCosts:
    """Make costs T = tau_0 + tau_B B + tau_S S for every step, in ms."""
    c = np.zeros((2, WIDTH))
    c[:, TAU_0], c[:, TAU_B], c[:, TAU_S] = tau_0, tau_B, tau_S
    return StepCosts(c)


def scaled_costs(costs: StepCosts, decode: float, with_prefill: float, host_ms: float = 0.0) -> StepCosts:
    """Scale the costs of decode steps and of steps with prefill, then add `host_ms` to every step."""
    changed = costs.typical.copy()
    changed[np.ix_([0, 1], LINEAR)] *= np.array([[decode], [with_prefill]])
    changed[:, TAU_0] += host_ms
    return costs._replace(typical=changed)


def _coefficients(fit: FitResult) -> FloatArray:
    if not fit.status.ok:
        raise FitNotUsable(fit.status.sentence, where=fit.model, remedy=fit.status.remedy)
    values = {name: estimate.value for name, estimate in fit.parameters.items()}
    peak = values.pop("P_max", 1.0)
    if unknown := [name for name in values if name not in COEFFICIENTS]:
        found = f"the engine has no step cost for the model {fit.model!r} ({', '.join(unknown)})"
        raise WrongUsage(found, remedy="Fit one of the families that `latfit fit --model` names.")
    if "b" in values and "Q_s" not in values:  # the hinge model
        values |= {"b_hinge": values.pop("b"), "S_0_hinge": values.pop("S_0")}
    values.setdefault("p_A", values.get("p", 0.0))
    c = np.array([values.get(name, 0.0) for name in COEFFICIENTS])
    c[[SAT_W0, SAT_W1]] /= peak
    return c


@inner
def _pmax(x: float, y: float, p: float) -> float:
    """Return the smooth maximum."""
    top = max(x, y)
    if min(x, y) <= 0.0:
        return top
    low = min(x, y) / top
    if p == 2.0:
        return float(top * np.sqrt(1.0 + low * low))
    if p == 4.0:
        return float(top * np.sqrt(np.sqrt(1.0 + low * low * low * low)))
    return float(top * (1.0 + low**p) ** (1.0 / p))


@inner
def _tiles(S: float, tile: float, rho: float) -> float:
    if tile <= 0.0:
        return 0.0
    if rho <= 0.0:
        return float(tile * np.ceil(S / tile))
    k = np.floor(S / tile)
    return float(max(tile, tile * (k + min((S / tile - k) / rho, 1.0))))


@inner
def of_tokens(c: FloatArray, B: float, S: float) -> float:
    """Return the part of a step's cost that depends on B and S."""
    T = c[TAU_0] + c[TAU_B] * B + c[TAU_S] * S
    if c[SAT_W1] > 0.0 or c[SAT_W0] > 0.0:
        g = 1.0 / (np.expm1(-c[SAT_KB] * B) * np.expm1(-c[SAT_KS] * S))
        T += (c[SAT_W0] + c[SAT_W1] * S) * g * (1.0 + c[GAMMA_B] * B + c[GAMMA_S] * S)
    if c[HINGE] > 0.0:
        T += c[HINGE] * max(S - c[HINGE_S0], 0.0)
    if c[GEMM] > 0.0:
        T += c[GEMM] * _pmax(c[GEMM_S0], S, c[P_NORM])
    if c[GEMM_B] > 0.0:
        T += c[GEMM_B] * _pmax(c[GEMM_S0], B, c[P_NORM])
    if c[TAU_H] > 0.0:
        T += c[TAU_H] * max(S - c[S_1], 0.0)
    if c[TAU_Q] > 0.0:
        T += c[TAU_Q] * _tiles(S, c[Q], c[RHO])
    if c[TAU_V] > 0.0:
        T += c[TAU_V] * _tiles(S, c[V], 0.0)
    if c[TAU_E] > 0.0:
        T -= c[TAU_E] * np.expm1(-c[K_E] * S)
    return float(T)


@inner
def _of_prefill(c: FloatArray, w: Work) -> float:
    """Return the extra cost of a step with prefill: attention over mixed lengths, and fixed costs of prefill."""
    D = max(w.B - w.n, 0.0)
    T = c[TAU_L] * w.KD + c[TAU_R] * w.KP + c[TAU_A] * w.A + c[TAU_N] * w.n + c[TAU_M] + c[TAU_Y] * D
    if c[ATTENTION] > 0.0:
        longest = max(w.L, w.KD / max(D, 1.0))
        T += c[ATTENTION] * _pmax(longest, w.A / c[P_0] + w.KD / c[Q_S], c[P_ATTENTION])
    if c[TAU_X] > 0.0:
        T += c[TAU_X] * D * max(w.KD - c[K_0], 0.0)
    return float(T)


@inner
def _along(t: Table, row: int, axis: int, amount: float) -> tuple[int, float]:
    """Return the node below an amount on an axis, and the weight of the node above."""
    count = t.counts[row, axis]
    if count == 0:
        return 0, 0.0
    x = np.log1p(amount)
    low, high = 0, count - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if t.nodes[row, axis, middle] <= x:
            low = middle
        else:
            high = middle
    start = t.nodes[row, axis, low]
    return low, min(max((x - start) / (t.nodes[row, axis, low + 1] - start), 0.0), 1.0)


@rare
def correction(t: Table, row: int, D: float, P: float, held: tuple[float, float]) -> float:
    """Interpolate the correction factor of a step that decodes D requests and computes P prefill tokens."""
    i, a = _along(t, row, 0, D)
    j, b = _along(t, row, 1, P)
    k, c = _along(t, row, 2, held[0])
    m, d = _along(t, row, 3, held[1])
    last = max(t.counts[row, 3], 1)
    third = last * max(t.counts[row, 2], 1)
    second = third * max(t.counts[row, 1], 1)
    g = 0.0
    for corner in range(8):
        up, right, on = corner & 1, (corner >> 1) & 1, corner >> 2
        weight = (a if up else 1.0 - a) * (b if right else 1.0 - b) * (c if on else 1.0 - c)
        if weight > 0.0:
            at = (i + up) * second + (j + right) * third + (k + on) * last + m
            g += weight * t.values[row, at]
            if d > 0.0:
                g += weight * d * (t.values[row, at + 1] - t.values[row, at])
    return float(np.exp(g))


@inner
def of_decoding(t: Table, B: float, cached: float) -> float:
    """Return the correction factor of a step that decodes B requests with `cached` tokens in all."""
    return 1.0 if t.values.shape[1] == 0 else float(correction(t, 0, B, 0.0, (cached / max(B, 1.0), 0.0)))


@entry
def step_ms(costs: StepCosts, w: Work) -> float:
    """Return the typical latency of a step in ms."""
    c, t = costs.typical, costs.table
    if w.P <= 0.0:
        D = max(w.B - w.n, 0.0)
        return float((of_decode(c[0], w.B, w.S) + c[0, TAU_K] * w.KD) * of_decoding(t, D, w.KD))
    T = of_tokens(c[1], w.B, w.S) + _of_prefill(c[1], w)
    if t.values.shape[1] > 0:
        D, length = max(w.B - w.n, 0.0), (w.KP + w.P) / max(w.n, 1.0)
        if D == 0.0 and t.counts[PREFILL_ALONE, 0] > 0:
            T *= correction(t, PREFILL_ALONE, w.n, w.P, (0.0, length))
        else:
            T *= correction(t, 1, D, w.P, (w.KD / max(D, 1.0), length))
    return float(T)


@inner
def drawn_ms(costs: StepCosts, s: State, w: Work) -> float:
    """Draw the latency of the next step of an engine in ms."""
    phase = phase_row(w.P, w.S)
    T = step_ms(costs, w) * level_of(costs.scatter, phase, w.S)
    return float(noisy_ms(costs.scatter, s, noise_group(costs.scatter, phase, w.B), T))


@inner
def of_decode(c: FloatArray, B: float, S: float) -> float:
    """Return the part of a decode step's cost that depends on B and S."""
    return float(of_tokens(c, B, S) + c[TAU_C] * max(B - c[B_1], 0.0))
