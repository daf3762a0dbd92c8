"""Identifiability of parameters: flat directions, and identifiable combinations.

A singular value decomposition of the scaled Jacobian finds exact aliases. For groups that are not identified, products,
ratios and sums that the data do determine are reported with intervals (delta method). Derivation:
docs/theory/fitting.md, "Identifiability".
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.model import Combination, LatencyModel, Steps
from latfit.stats import FloatArray

FLAT = 1e-8
TRADES = 0.3
"""Component in a direction from which a parameter compensates the others in it."""


@dataclass(frozen=True)
class Directions:
    """Singular value decomposition of the scaled Jacobian.

    lengths: of the columns (p,). singular: values (p,). right: vectors (p, p) as rows. flat_groups: columns that are
    exactly flat together.
    """

    lengths: FloatArray
    singular: FloatArray
    right: FloatArray
    flat_groups: list[list[int]]

    @property
    def condition(self) -> float:
        return condition_number(self.singular)

    @property
    def flat(self) -> FloatArray:
        """Right vectors (k, p) of the flat directions."""
        return self.right[self.singular < FLAT * max(float(self.singular[0]), 1e-300)]

    def root(self) -> FloatArray:
        """Return R (k, p) with R'R = (J'WJ)^-1 in the columns' units, without flat directions."""
        keep = self.singular >= FLAT * max(float(self.singular[0]), 1e-300)
        return np.asarray(
            self.right[keep] / self.singular[keep][:, None] / np.where(self.lengths > 0, self.lengths, 1.0)
        )

    def inverse(self) -> FloatArray:
        """Return (J'WJ)^-1 (p, p) in the columns' units, without flat directions."""
        root = self.root()
        return root.T @ root


def condition_number(singular: FloatArray) -> float:
    """Return largest over smallest of descending singular values; infinite if the smallest is rounding error."""
    known = len(singular) > 0 and singular[-1] > np.finfo(float).eps * singular[0]
    return float(singular[0] / singular[-1]) if known else np.inf


def decompose(J: FloatArray, weights: FloatArray) -> Directions:
    """Decompose a Jacobian (n, p) with row weights (n,)."""
    scaled = J * np.sqrt(weights)[:, None]
    lengths = np.linalg.norm(scaled, axis=0)
    dead = lengths <= FLAT * max(float(lengths.max(initial=0.0)), 1e-300)
    unit = scaled / np.where(dead, 1.0, lengths)
    unit[:, dead] = 0.0
    triangle = np.linalg.qr(unit, mode="r")
    _, singular, right = np.linalg.svd(triangle, full_matrices=True)
    padded = np.zeros(J.shape[1])
    padded[: len(singular)] = singular
    groups: list[list[int]] = [[int(i)] for i in np.flatnonzero(dead)]
    for value, direction in zip(padded, right, strict=True):
        members = [int(i) for i in np.flatnonzero(np.abs(direction) > 0.1) if not dead[i]]
        if value < FLAT * padded[0] and members:
            merge(groups, members)
    return Directions(lengths, padded, right, groups)


def merge(groups: list[list[int]], members: Sequence[int]) -> None:
    """Add a group, merged with the groups it shares a member with."""
    united = sorted({*members, *(i for group in groups if set(group) & set(members) for i in group)})
    groups[:] = [group for group in groups if not set(group) & set(members)] + [united]


def weak_groups(directions: Directions, weak: Sequence[int]) -> list[list[int]]:
    """Group weakly determined parameters with those they compensate in their flattest direction."""
    groups: list[list[int]] = []
    for i in weak:
        direction = np.abs(flattest_for(directions, i))
        merge(groups, [j for j in weak if j == i or direction[j] > TRADES])
    return groups


def flattest_for(directions: Directions, i: int) -> FloatArray:
    """Return the direction (p,) that adds most to the variance of parameter i."""
    added = np.abs(directions.right[:, i]) / np.maximum(directions.singular, 1e-300)
    return np.asarray(directions.right[int(np.argmax(added))])


def log_jacobian(model: LatencyModel, theta: FloatArray, steps: Steps, names: Sequence[str]) -> FloatArray:
    """Return dlnT/dln theta_j (n, len(names)) at parameters theta (p,); zero for parameters that are zero."""
    columns = [i for name in names for i, p in enumerate(model.parameters) if p.name == name]
    T = np.maximum(model.latency_ms(theta, steps), 1e-300)
    return np.asarray(model.gradient(theta, steps)[:, columns] * theta[columns] / T[:, None])


def log_condition(problem: FitProblem, theta: FloatArray) -> float:
    """Return the condition number of `log_jacobian` for nonzero free parameters; infinite for an exact alias."""
    names = [p.name for p, i in zip(problem.free_parameters, problem.free, strict=True) if theta[i] != 0]
    if not names:
        return 1.0
    weights = np.add.reduceat(problem.weights, problem.firsts)  # rows of one cell have one slope
    J = log_jacobian(problem.model, theta, problem.rows_at(problem.firsts).steps, names) * np.sqrt(weights)[:, None]
    return (
        condition_number(np.linalg.svd(np.linalg.qr(J, mode="r"), compute_uv=False)) if len(J) >= len(names) else np.inf
    )


CERTAIN = 0.25
BETTER = 0.5
MOST = 3
_ORTHOGONAL = 1e-5
_NONE = 1e-9
_LARGEST_GROUP = 6
_PEAK = "tokens/ms"


@dataclass(frozen=True)
class _Candidate:
    expression: str
    value: float
    gradient: FloatArray
    members: frozenset[str]
    dimension: tuple[int, int]
    unit: str


def combinations(
    problem: FitProblem,
    theta: FloatArray,
    root: FloatArray,
    directions: Directions,
    groups: Sequence[Sequence[int]],
    quantile: float,
) -> list[Combination]:
    """Return the identifiable combinations of each group of free coordinates.

    Parameters
    ----------
    root
        R (k, p) with R'R the covariance of the coordinates z.
    quantile
        Standard errors from a value to the end of its interval.
    """
    found: dict[str, Combination] = {}
    for group in groups:
        members = _with_partners(directions, group)
        if not 2 <= len(members) <= _LARGEST_GROUP:
            continue
        for candidate, error in _best(problem, theta, root, directions, members, group):
            found.setdefault(candidate.expression, _with_interval(candidate, error, quantile))
    return list(found.values())


def _with_partners(directions: Directions, group: Sequence[int]) -> list[int]:
    """Return the group and the parameters that its members compensate; columns of zeros have none."""
    alive = [i for i in group if directions.lengths[i] > 0 and np.any(directions.right[directions.singular > 0][:, i])]
    partners = {int(j) for i in alive for j in np.flatnonzero(np.abs(flattest_for(directions, i)) > TRADES)}
    return sorted({*alive, *partners})


def _best(
    problem: FitProblem,
    theta: FloatArray,
    root: FloatArray,
    directions: Directions,
    members: Sequence[int],
    group: Sequence[int],
) -> Iterator[tuple[_Candidate, float]]:
    names = [p.name for p in problem.free_parameters]
    null = directions.flat / np.where(directions.lengths > 0, directions.lengths, 1.0)  # flat directions in z
    lost = {i for i in group if len(group) > 1}
    z = theta[problem.free] / problem.scales[problem.free]
    sizes = np.array([1.0 if p.positive else max(x, 1e-3) for p, x in zip(problem.free_parameters, z, strict=True)])
    alone = {}
    for i in members:
        single = _monomial(problem, theta, {names[i]: 1})
        error = None if i in lost else _error(single.gradient, root, null, sizes)
        alone[names[i]] = math.inf if error is None or single.value <= 0 else error / single.value
    aliased = {names[i] for i in members if np.any(np.abs(directions.flat[:, i]) > TRADES)}
    ranked = []
    for candidate in _candidates(problem, theta, members):
        error = _error(candidate.gradient, root, null, sizes)
        if error is not None and error <= _NONE * candidate.value:
            continue  # it moves along a flat direction, which `root` leaves out
        certain = error is not None and error <= CERTAIN * candidate.value
        if error is None or candidate.value <= 0 or not (certain or candidate.members <= aliased):
            continue
        relative = error / candidate.value
        if relative <= BETTER * min(alone[name] for name in candidate.members):
            ranked.append((max(relative, 1e-3) * 2.0 ** len(candidate.members), candidate, error))
    chosen: list[FloatArray] = []
    for _, candidate, error in sorted(ranked, key=lambda item: item[0]):
        direction = candidate.gradient / max(float(np.linalg.norm(candidate.gradient)), 1e-300)
        rest = direction - sum((float(direction @ other) * other for other in chosen), np.zeros_like(direction))
        if float(np.linalg.norm(rest)) < TRADES or len(chosen) >= MOST:
            continue
        chosen.append(rest / float(np.linalg.norm(rest)))
        yield candidate, error


def _error(gradient: FloatArray, root: FloatArray, null: FloatArray, sizes: FloatArray) -> float | None:
    """Return the standard error of a combination; None if it moves along a flat direction, in units of `sizes`."""
    along, flat = gradient * sizes, null / sizes
    length, lengths = float(np.linalg.norm(along)), np.linalg.norm(flat, axis=1)
    if length == 0 or np.any(np.abs(flat @ along) > _ORTHOGONAL * length * np.where(lengths > 0, lengths, 1.0)):
        return None
    return float(np.linalg.norm(root @ gradient))


def _candidates(problem: FitProblem, theta: FloatArray, members: Sequence[int]) -> Iterator[_Candidate]:
    free = [problem.free_parameters[i] for i in members]
    names = [p.name for p in free]
    peaks = [p.name for p in free if p.positive and p.unit == _PEAK]
    rates = [p.name for p in free if p.positive and p.unit.startswith("1/")]
    work = [p.name for p in free if p.unit == "tokens"]
    work += [name for name, value in problem.fixed.items() if value == 1.0 and name.startswith("w_")]
    powers: list[Mapping[str, int]] = [{name: 1} for name in names]
    for top, peak in itertools.product(work, peaks):
        powers.append({top: 1, peak: -1})
        powers += [{top: 1, peak: -1, rate: -1} for rate in rates]
    powers += [{peak: 1, rate: 1} for peak, rate in itertools.product(peaks, rates)]
    powers += [{one: 1, other: 1} for one, other in itertools.combinations(rates, 2)]
    monomials = [_monomial(problem, theta, power) for power in powers]
    monomials += list(_at_one_value(problem, monomials))
    yield from (m for m in monomials if len(m.members) > 1)
    for count in (2, 3):
        for parts in itertools.combinations(monomials, count):
            disjoint = len(frozenset().union(*(m.members for m in parts))) == sum(len(m.members) for m in parts)
            if disjoint and len({m.dimension for m in parts}) == 1 and not any(_inverse(m) for m in parts):
                yield _sum(parts)


def _at_one_value(problem: FitProblem, monomials: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Yield costs of a request or a token as costs of a step, if all steps have the same B or S."""
    for column, unit in (("B", "ms/request"), ("S", "ms/token")):
        count = float(problem.steps[column][0])
        if np.ptp(problem.steps[column]) > 0:
            continue
        for m in monomials:
            if m.unit == unit:
                written = m.expression if count == 1 else f"{count:g}*{m.expression}"
                yield _Candidate(written, count * m.value, count * m.gradient, m.members, (0, 1), "ms")


def _inverse(monomial: _Candidate) -> bool:
    """Return whether a monomial is no cost: rates and peaks do not add."""
    return monomial.dimension[1] <= 0


def _monomial(problem: FitProblem, theta: FloatArray, powers: Mapping[str, int]) -> _Candidate:
    """Return a product of powers of parameters; fixed ones such as w_1 are written but do not vary."""
    index = {p.name: i for i, p in enumerate(problem.model.parameters)}
    values = {name: float(theta[index[name]]) for name in powers}
    value = math.prod(values[name] ** power for name, power in powers.items())
    gradient = np.zeros(len(problem.free))
    for position, i in enumerate(problem.free):
        parameter = problem.model.parameters[i]
        power = powers.get(parameter.name, 0)
        if power and parameter.positive:
            gradient[position] = power * value
        elif power:
            rest = math.prod(values[name] ** p for name, p in powers.items() if name != parameter.name)
            gradient[position] = float(problem.scales[i]) * rest
    units = [(problem.model.parameters[index[name]].unit, power) for name, power in powers.items()]
    free = {p.name for p in problem.free_parameters}
    tokens, requests, ms = (sum(power * _power(unit, what) for unit, power in units) for what in _DIMENSIONS)
    members = frozenset(name for name in powers if name in free)
    return _Candidate(_written(powers), value, gradient, members, (tokens + requests, ms), _unit(tokens, requests, ms))


_DIMENSIONS = ("token", "request", "ms")


def _power(unit: str, what: str) -> int:
    above, _, below = unit.partition("/")
    return int(what in above) - below.strip("()").split().count(what)


def _unit(tokens: int, requests: int, ms: int) -> str:
    above = [name if power == 1 else f"{name}^{power}" for name, power in _named(tokens, requests, ms) if power > 0]
    below = [name if power == -1 else f"{name}^{-power}" for name, power in _named(tokens, requests, ms) if power < 0]
    bottom = f"({' '.join(below)})" if len(below) > 1 else "".join(below)
    return (" ".join(above) or "1") + (f"/{bottom}" if bottom else "")


def _named(tokens: int, requests: int, ms: int) -> tuple[tuple[str, int], ...]:
    return (("ms", ms), ("token", tokens), ("request", requests))


def _written(powers: Mapping[str, int]) -> str:
    above = "*".join(name for name, power in powers.items() if power > 0)
    below = [name for name, power in powers.items() if power < 0]
    return above + ("" if not below else f"/{below[0]}" if len(below) == 1 else f"/({'*'.join(below)})")


def _sum(parts: Sequence[_Candidate]) -> _Candidate:
    value, gradient = sum(m.value for m in parts), np.sum([m.gradient for m in parts], axis=0)
    members = frozenset().union(*(m.members for m in parts))
    return _Candidate(
        " + ".join(m.expression for m in parts), value, gradient, members, parts[0].dimension, parts[0].unit
    )


def _with_interval(candidate: _Candidate, error: float, quantile: float) -> Combination:
    """Add the interval: on the log scale if the value is certain (candidates are positive), else cut at zero."""
    if error > CERTAIN * candidate.value:
        low, high = candidate.value - quantile * error, candidate.value + quantile * error
        return Combination(candidate.expression, candidate.value, max(low, 0.0), high, candidate.unit)
    reach = math.exp(quantile * error / candidate.value)
    value = candidate.value
    return Combination(candidate.expression, value, value / reach, value * reach, candidate.unit)
