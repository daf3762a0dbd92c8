"""Cost of an engine step in compiled code, with the noise of single steps: docs/theory/simulation.md, "Step cost".

Generated from the terms of the built-in models: one vector of coefficients covers them.
"""

from collections.abc import Callable, Sequence
from inspect import isfunction
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import entry, first_beyond, inner, mixed, rare, uncached
from latfit.errors import FitNotUsable, WrongUsage
from latfit.model import (
    BUILT_IN,
    CONSTANT,
    CORRECTION,
    LINEAR,
    OF_PREFILL_ALONE,
    OF_STEPS,
    Expression,
    FitResult,
    LatencyModel,
    NoiseTable,
    StepNoise,
    Term,
    drawn_step_ms,
    model_named,
    noise_table,
)
from latfit.simulation.engine.state import State
from latfit.stats import FloatArray, IntArray
from latfit.trace import DECODE, MIXED, PERIOD, PREFILL


@inner
def uniform(seed: int, request: int, token: int, place: int) -> float:
    """Return a number in [0, 1) for one place of one draft: a splitmix64 hash of all arguments."""
    x = np.uint64(seed)
    for part in (request, token, place):
        x = mixed(x + np.uint64(part) + np.uint64(0x9E3779B97F4A7C15))
    return float((x >> np.uint64(11)) * (1.0 / 9007199254740992.0))


@inner
def sequence(stream: NDArray[np.uint64]) -> float:
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
MAX_SIZE = 1 << 20  # tokens of a step; larger ones have its level


class Scatter(NamedTuple):
    level: FloatArray  # ratios to the typical cost (3, k) by phase and tokens of the step, the last for all larger ones
    noise: NoiseTable
    on: bool


def scatter_from(decode: StepNoise | None, prefill: StepNoise | None, mixed: StepNoise | None) -> Scatter:
    phases = (decode, prefill, mixed)
    largest = max((float(each.levels.sizes[-1]) for each in phases if each is not None), default=1.0)
    sizes = np.maximum(np.arange(np.ceil(min(largest, MAX_SIZE)) + 1.0), 1.0)
    level = np.stack([np.ones(len(sizes)) if each is None else each.levels.factors(sizes) for each in phases])
    return Scatter(level, noise_table(phases, BATCHES - 1), any(each is not None for each in phases))


NONE = scatter_from(None, None, None)


@inner
def phase_row(P: float, S: float) -> int:
    return OF_DECODE if P <= 0.0 else OF_PREFILL if P >= S else OF_MIXED


@inner
def level_of(c: Scatter, phase: int, S: float) -> float:
    """Return the level of steps of S tokens: measured latency over typical cost."""
    return float(c.level[phase, min(int(S), c.level.shape[1] - 1)]) if c.on else 1.0


@inner
def noise_group(c: Scatter, phase: int, B: float) -> int:
    return int(c.noise.group[phase, min(int(B), BATCHES - 1)])


@inner
def noisy_ms(c: Scatter, s: State, group: int, T: float) -> float:
    """Draw the latency of the next step from T, its typical cost times its level."""
    return float(drawn_step_ms(c.noise, group, T, sequence(s.stream))) if c.on else T


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


def terms_of(model: LatencyModel | None) -> tuple[Term, ...]:
    if model is None:
        return ()
    return (*terms_of(getattr(model, "base", None)), *getattr(model, "terms", ()))


COLUMNS: Any = tuple(dict.fromkeys(term.column for model in BUILT_IN for term in terms_of(model)))
"""Columns of all terms of the built-in models, each an `Expression`."""

PLACES = {column: place for place, column in enumerate(COLUMNS)}
SHAPES = sorted({name for column in COLUMNS for name in column.names} - {*Work._fields, "m", "D"})
SHAPE_PLACES = {name: len(COLUMNS) + place for place, name in enumerate(SHAPES)}
WIDTH = len(COLUMNS) + len(SHAPES)
"""A vector of coefficients has the coefficient of each column, then the value of each shape."""

DECODE_STEP = {**dict.fromkeys((*Work._fields, "m"), 0.0), "B": 3.0, "S": 3.0, "D": 3.0, "KD": 7.0}
OF_DECODING = [column for column in COLUMNS if column(DECODE_STEP, dict.fromkeys(SHAPES, 1.0)) != 0.0]


def compiled_sum(name: str, columns: Sequence[Expression]) -> Any:
    """Compile a function of (coefficients, work) that adds up the terms with these columns."""
    read = {name: f"c[{place}]" for name, place in SHAPE_PLACES.items()} | {name: f"w.{name}" for name in Work._fields}
    lines = [f"def {name}(c, w):", "    T, m, D = 0.0, 1.0 if w.P > 0.0 else 0.0, max(w.B - w.n, 0.0)"]
    names: dict[str, Any] = {}
    for column in columns:
        place, values = PLACES[column], [read.get(each, each) for each in column.names]
        lines.append(f"    if c[{place}] > 0.0:")
        lines.append(f"        T += c[{place}] * column_{place}({', '.join(values)})")
        names[f"column_{place}"] = _compiled(column.function)
    exec("\n".join([*lines, "    return T"]), names)
    return uncached(names[name])


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile a function and the functions of its module that it calls."""
    found = function.__globals__
    called = {name: _compiled(found[name]) for name in function.__code__.co_names if isfunction(found.get(name))}
    return uncached(FunctionType(function.__code__, {**found, **called}, function.__name__, function.__defaults__))


of_decode = compiled_sum("of_decode", [column for column in OF_DECODING if "KD" not in column.names])
of_context = compiled_sum("of_context", [column for column in OF_DECODING if "KD" in column.names])
of_prefill = compiled_sum("of_prefill", COLUMNS)
"""Cost of a decode step by its B and S, and by its cached tokens; cost of a step with prefill."""

PREFILL_ALONE = 2  # row of the correction table for steps with prefill only


class Table(NamedTuple):
    """Smooth corrections of decode steps, mixed steps and prefill-only steps, a row each."""

    counts: IntArray  # nodes on each axis (3, 4); 0 if the table lacks the axis
    nodes: FloatArray  # node positions (3, 4, k), padded
    values: FloatArray  # log factors (3, m) in axis order; m = 0 if no fit has a correction


class StepCosts(NamedTuple):
    typical: FloatArray  # coefficients (2, WIDTH) of decode steps and of steps with prefill
    scatter: Scatter = NONE  # noise of single steps
    table: Table = Table(np.zeros((3, 4), dtype=np.int64), np.zeros((3, 4, 0)), np.zeros((3, 0)))  # smooth corrections
    # Host time (3,) by phase at the end of a step, after its tokens appear; see `loop`
    host_ms: FloatArray = np.zeros(3)


def step_costs(fit: FitResult, with_prefill: FitResult | None = None, *, scatter: bool = True) -> StepCosts:
    """Make step costs from one fit, or from a decode fit and a fit of steps with prefill.

    scatter: whether single steps vary as measured. Raises FitNotUsable, WrongUsage.
    """
    fits = {DECODE: fit, PREFILL: with_prefill or fit, MIXED: with_prefill or fit}
    typical = np.stack([_coefficients(fits[DECODE]), _coefficients(fits[MIXED])])
    noise = scatter_from(*(each.step_noise(phase) for phase, each in fits.items())) if scatter else NONE
    host = [_host_ms(each, phase) for phase, each in fits.items()]
    return StepCosts(typical, noise, _table(fits[DECODE], fits[MIXED]), AFTER_TOKENS * np.array(host))


AFTER_TOKENS = 0.5  # share of the host time after a step's tokens appear; records do not show it


def _host_ms(fit: FitResult, phase: str) -> float:
    """Return the mean period minus the mean step time; 0 if the fit lacks them."""
    try:
        means = fit.data.more["host"][phase]
        gap = float(means["period_ms"] - means["T_ms"]) if fit.data.more["time"] == PERIOD else 0.0
    except (LookupError, TypeError):
        return 0.0
    return gap if 0.0 < gap < np.inf else 0.0


def _table(decode: FitResult, with_prefill: FitResult) -> Table:
    several = with_prefill.correction
    found = [decode.correction, several, several and several.prefill_alone]
    # The table of prefill-only steps has requests in prefill on its first axis.
    axes = [OF_STEPS, OF_STEPS, (OF_PREFILL_ALONE[0], *OF_STEPS[1:])]
    rows = [[each.nodes.get(name, ()) if each else () for name in axes[i]] for i, each in enumerate(found)]
    counts = np.array([[len(nodes) for nodes in row] for row in rows])
    nodes = np.zeros((*counts.shape, int(counts.max())))
    values = np.zeros((len(found), max(each.log_factor.size if each else 0 for each in found)))
    for i, each in enumerate(found):
        for axis, places in enumerate(rows[i]):
            nodes[i, axis, : len(places)] = places
        if each is not None:
            values[i, : each.log_factor.size] = each.log_factor
    return Table(counts, nodes, values)


def linear_costs(tau_0: float, tau_B: float, tau_S: float) -> StepCosts:
    """Make costs T = tau_0 + tau_B B + tau_S S, in ms."""
    c = np.zeros((2, WIDTH))
    c[:, [PLACES[term.column] for term in LINEAR.terms]] = tau_0, tau_B, tau_S
    return StepCosts(c)


def scaled_costs(costs: StepCosts, decode: float, with_prefill: float, host_ms: float = 0.0) -> StepCosts:
    """Scale the costs of decode steps and of steps with prefill, then add `host_ms` to every step."""
    changed = costs.typical.copy()
    changed[:, : len(COLUMNS)] *= np.array([[decode], [with_prefill]])
    changed[:, PLACES[CONSTANT.terms[0].column]] += host_ms
    return costs._replace(typical=changed)


def _coefficients(fit: FitResult) -> FloatArray:
    if not fit.status.ok:
        raise FitNotUsable(fit.status.sentence, where=fit.model, remedy=fit.status.remedy)
    values = {name: estimate.value for name, estimate in fit.parameters.items()}
    terms = terms_of(model_named(fit.model.removesuffix(CORRECTION)))
    known = {"P_max", *SHAPES, *(term.parameter.name for term in terms if term.column in PLACES)}
    if unknown := [name for name in values if name not in known]:
        found = f"the engine has no step cost for the model {fit.model!r} ({', '.join(unknown)})"
        raise WrongUsage(found, remedy="Fit one of the families that `latfit fit --model` names.")
    values.setdefault("p_A", values.get("p", 0.0))
    for name in ("w_0", "w_1"):
        values[name] = values.get(name, 0.0) / values.get("P_max", 1.0)
    c = np.zeros(WIDTH)
    c[list(SHAPE_PLACES.values())] = [values.get(name, 0.0) for name in SHAPE_PLACES]
    for term in terms:
        c[PLACES[term.column]] = values.get(term.parameter.name, 0.0)
    return c


@inner
def _along(t: Table, row: int, axis: int, amount: float) -> tuple[int, float]:
    """Return the node below an amount on an axis, and the weight of the node above."""
    count = t.counts[row, axis]
    if count == 0:
        return 0, 0.0
    x, nodes = np.log1p(amount), t.nodes[row, axis]
    low = first_beyond(nodes, 1, count - 1, x) - 1
    return low, min(max((x - nodes[low]) / (nodes[low + 1] - nodes[low]), 0.0), 1.0)


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
    return 1.0 if t.values.shape[1] == 0 else float(correction(t, 0, B, 0.0, (cached / max(B, 1.0), 0.0)))


@entry
def step_ms(costs: StepCosts, w: Work) -> float:
    """Return the typical latency of a step in ms."""
    t, D = costs.table, max(w.B - w.n, 0.0)
    if w.P <= 0.0:
        return float((of_decode(costs.typical[0], w) + of_context(costs.typical[0], w)) * of_decoding(t, D, w.KD))
    T = of_prefill(costs.typical[1], w)
    if t.values.shape[1] > 0:
        length = (w.KP + w.P) / max(w.n, 1.0)
        if D == 0.0 and t.counts[PREFILL_ALONE, 0] > 0:
            T *= correction(t, PREFILL_ALONE, w.n, w.P, (0.0, length))
        else:
            T *= correction(t, 1, D, w.P, (w.KD / max(D, 1.0), length))
    return float(T)


@inner
def drawn_ms(costs: StepCosts, s: State, w: Work) -> float:
    phase = phase_row(w.P, w.S)
    T = step_ms(costs, w) * level_of(costs.scatter, phase, w.S)
    return float(noisy_ms(costs.scatter, s, noise_group(costs.scatter, phase, w.B), T))
