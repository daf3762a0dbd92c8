"""The interface of a latency model, and models as tables of terms.

T = [base model] + sum_j c_j X_j(step; shapes) with c_j >= 0. A column X_j may depend on shapes (a corner, a
rate). Choices (a tile length, sharpness) take a few values. The engine simulator compiles the columns of built-in
terms.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from latfit.model.features import Features, features_of
from latfit.stats import FloatArray

Steps = Mapping[str, FloatArray]  # columns of steps by trace name (`B`, `S`, `context_tokens`, ...), each (n,) float64


@dataclass(frozen=True)
class Parameter:
    name: str
    unit: str
    meaning: str
    positive: bool = False  # above zero by nature (rates and peaks), searched on the log scale; others may be zero
    fixed: float | None = None  # value it has unless a user frees it


class LatencyModel(Protocol):
    """Structure of a separable formula: given its outer parameters, latency is basis @ coefficients >= 0."""

    @property
    def name(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rates(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def outer(self) -> tuple[str, ...]:
        """Parameters that the latency is not linear in, in the order of `basis`."""
        ...

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        """Return the search range of a parameter on these steps; None if its unit decides."""
        ...

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """Return T in ms (n,) for parameters theta (p,); (k, n) for k vectors at once, given as (p, k, 1)."""
        ...

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """Return dT/dtheta (n, p); (k, n, p) for k vectors."""
        ...

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        """Return the non-negative columns (n, m) that the latency is linear in; (k, n, m) for outer (q, k, 1)."""
        ...

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        """Return theta (p,) from outer parameters and linear coefficients (m,)."""
        ...


Shapes = Mapping[str, Any]  # values of shapes and choices by name; of k parameter vectors at once (k, 1) for shapes

Column = Callable[[Features, Shapes], FloatArray]


@dataclass(frozen=True)
class Term:
    parameter: Parameter
    column: Column
    slopes: Mapping[str, Column] = field(default_factory=dict)  # d column / d shape, by the shape's name
    when: Callable[[Features], bool] = lambda f: True  # whether steps determine the term; otherwise it is zero


@dataclass(frozen=True)
class Expression:
    """A column as a function, of arrays or single numbers, of the features and shapes that its parameters name."""

    function: Callable[..., FloatArray]

    @cached_property
    def names(self) -> tuple[str, ...]:
        code = self.function.__code__
        return code.co_varnames[: code.co_argcount]

    def __call__(self, features: Features, shapes: Shapes) -> FloatArray:
        return self.function(*[features[name] if name in features else shapes[name] for name in self.names])


def term(
    name: str,
    unit: str,
    meaning: str,
    column: Callable[..., FloatArray],
    when: Callable[[Features], bool] = lambda f: True,
    **slopes: Callable[..., FloatArray],
) -> Term:
    return Term(
        Parameter(name, unit, meaning),
        Expression(column),
        {shape: Expression(slope) for shape, slope in slopes.items()},
        when,
    )


@dataclass(frozen=True)
class Shape:
    parameter: Parameter
    span: Callable[[Features], tuple[float, float]]  # range in which it is searched


def shape(name: str, unit: str, meaning: str, span: Callable[[Features], tuple[float, float]]) -> Shape:
    return Shape(Parameter(name, unit, meaning, positive=True), span)


@dataclass(frozen=True)
class Choice:
    """A parameter that takes one of a few values; the first if no column depends on it."""

    parameter: Parameter
    values: tuple[float, ...]


@dataclass(frozen=True)
class Separable:
    """A table of terms, possibly added to a base model."""

    name: str
    formula: str
    terms: tuple[Term, ...]
    shapes: tuple[Shape, ...] = ()
    choices: tuple[Choice, ...] = ()
    base: LatencyModel | None = None
    columns: tuple[str, ...] = ("B", "S")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        own = (tuple(t.parameter for t in self.terms), tuple(s.parameter for s in self.shapes))
        return (*self._base_parameters, *own[0], *own[1], *(choice.parameter for choice in self.choices))

    @property
    def rates(self) -> tuple[tuple[str, str], ...]:
        return self.base.rates if self.base else ()

    @cached_property
    def outer(self) -> tuple[str, ...]:
        return (*(self.base.outer if self.base else ()), *self._outer_names)

    @cached_property
    def _base_parameters(self) -> tuple[Parameter, ...]:
        return self.base.parameters if self.base else ()

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        for shape in self.shapes:
            if shape.parameter.name == name:
                return shape.span(features_of(steps))
        return self.base.span(name, steps) if self.base else None

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        front, coefficients, shapes = self._split(theta)
        seen = features_of(steps)
        total = self.base.latency_ms(front, steps) if self.base else np.zeros((*theta.shape[1:-1], len(seen["S"])))
        for c, term, used in zip(coefficients, self.terms, _used(coefficients), strict=True):
            if used:
                total = total + c * term.column(seen, shapes)
        return total

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        front, coefficients, shapes = self._split(theta)
        seen, first = features_of(steps), len(front)
        slopes = np.zeros((len(theta), *theta.shape[1:-1], len(seen["S"])))
        if self.base:
            slopes[:first] = np.moveaxis(self.base.gradient(front, steps), -1, 0)
        for j, term in enumerate(self.terms, start=first):
            slopes[j] = term.column(seen, shapes)
        for c, term, used in zip(coefficients, self.terms, _used(coefficients), strict=True):
            for j, shape in enumerate(self.shapes, start=first + len(self.terms)):
                if used and shape.parameter.name in term.slopes:
                    slopes[j] += c * term.slopes[shape.parameter.name](seen, shapes)
        return np.moveaxis(slopes, 0, -1)

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        seen, shapes = features_of(steps), self._named(outer[self._in_base :])
        shape = (*outer.shape[1:-1], len(seen["S"]))
        own = np.stack([np.broadcast_to(term.column(seen, shapes), shape) for term in self.terms], axis=-1)
        if self.base is None:
            return own
        return np.concatenate([self.base.basis(outer[: self._in_base], steps), own], axis=-1)

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        own, in_base = len(self.terms), self._in_base
        front = self.base.assemble(outer[:in_base], coefficients[:-own]) if self.base else np.empty(0)
        return np.concatenate([front, coefficients[len(coefficients) - own :], outer[in_base:]])

    def held(self, steps: Steps, weights: FloatArray, given: Shapes, known: Container[str] = ()) -> dict[str, float]:
        """Return the values of parameters that these steps do not determine: dependent terms and their shapes.

        known: terms that are held already.
        """
        seen = features_of(steps)
        shapes = self._nominal(seen, given)
        rows = np.sqrt(weights)[:, None]
        base = np.empty((len(rows), 0))
        if self.base is not None:
            middle = [1 / float(np.median(steps[column])) for _, column in self.base.rates]
            base = self.base.basis(np.array(middle + [0.0] * (self._in_base - len(middle))), steps) * rows
        possible = [t for t in self.terms if t.parameter.name not in known and t.when(seen)]
        own = np.stack([np.empty(len(rows)), *(t.column(seen, shapes) for t in possible)], axis=1)[:, 1:] * rows
        new = _independent(base, own)
        free = [t for t, is_new in zip(possible, new, strict=True) if is_new or t.parameter.name in NEVER_HELD]
        needed = {name for term in free for name in term.slopes}
        found = {term.parameter.name: 0.0 for term in self.terms if term not in free}
        return found | {name: shapes[name] for s in self.shapes if (name := s.parameter.name) not in needed}

    def column_means(self, steps: Steps, weights: FloatArray, given: Shapes) -> dict[str, float]:
        seen = features_of(steps)
        shapes = self._nominal(seen, given)
        return {t.parameter.name: float(np.average(t.column(seen, shapes), weights=weights)) for t in self.terms}

    def _nominal(self, seen: Features, given: Shapes) -> dict[str, float]:
        """Return given values, else the middle of each shape's range and the fixed values of choices."""
        middle = {shape.parameter.name: float(np.sqrt(np.prod(shape.span(seen)))) for shape in self.shapes}
        middle |= {c.parameter.name: c.parameter.fixed or 0.0 for c in self.choices}
        return {name: given.get(name, value) for name, value in middle.items()}

    @cached_property
    def _outer_names(self) -> tuple[str, ...]:
        return (*(s.parameter.name for s in self.shapes), *(choice.parameter.name for choice in self.choices))

    @property
    def _in_base(self) -> int:
        return len(self.base.outer) if self.base else 0

    def _named(self, values: FloatArray) -> Shapes:
        """Return shapes, and choices as numbers: all vectors have the same."""
        named = dict(zip(self._outer_names, values, strict=True))
        return named | {c.parameter.name: float(named[c.parameter.name].item(0)) for c in self.choices}

    def _split(self, theta: FloatArray) -> tuple[FloatArray, FloatArray, Shapes]:
        first = len(self._base_parameters)
        middle = first + len(self.terms)
        return theta[:first], theta[first:middle], self._named(theta[middle:])


def _used(coefficients: FloatArray) -> list[bool]:
    """Return which coefficients (m,) are not zero, in any of several vectors of them (m, k, 1)."""
    if coefficients.ndim == 1:
        return [c != 0 for c in coefficients.tolist()]
    return [bool(used) for used in (coefficients != 0).reshape(len(coefficients), -1).any(axis=1)]


NEVER_HELD = ("tau_0", "tau_B", "tau_S")  # zero for tau_S would be a claim where only tau_B + tau_S is identifiable

MIN_NEW_SHARE = 1e-5  # of a column's length outside the span of those before it; less is rounding


def _independent(base: FloatArray, own: FloatArray) -> list[bool]:
    """Return which columns of `own` (n, m) are no combination of `base` (n, k) and the independent ones before them."""
    X = np.concatenate([base, own], axis=1)
    size = np.linalg.norm(X, axis=0)
    X = X / np.where(size > 0, size, 1.0)
    # A root of the inner products has the columns' lengths and angles, and few rows.
    values, vectors = np.linalg.eigh(X.T @ X)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    kept, directions = [], np.empty((len(root), 0))
    for column in root.T:
        rest = column - directions @ (directions.T @ column)
        rest = rest - directions @ (directions.T @ rest)
        new = float(np.linalg.norm(rest))
        kept.append(new > MIN_NEW_SHARE)
        if kept[-1]:
            directions = np.concatenate([directions, (rest / new)[:, None]], axis=1)
    return kept[base.shape[1] :]
