"""Systems whose truth is known: does `auto` answer on all of them, and how far is it from the best one could have done.

A system is a law of T (a constant, a line, a saturating batch, a kink, a line with attention, one with cached context,
a roofline), its parameters, a design (a grid with repeats, few cells, one batch size, decode only, a log with steps of
any size), noise of 0 to 30 %, pauses, and 8 to 5,000 rows. `auto` is fitted to the rows and predicts 2,000
other steps of the same design and noise; so are a line and the truth's own family. The ratio is that of mean relative
errors, auto over the better of the two, each with an allowance of 0.1 %, below which nobody would tell two fits apart.

Aims: no failure; the 95th percentile of the ratio at most 1.15 from 100 rows on, and 1.5 below 30.
`python -m benchmarks.planted [--smoke] [systems]`
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.features import StepTable
from latfit.model.registry import FAMILY
from latfit.stats import FloatArray
from latfit.trace.table import Trace

SYSTEMS = 500
ASKED = 2000
ALLOWANCE_PCT = 0.1
FAMILIES = ("constant", "linear", "saturation", "hinge", "quadratic", "context", "roofline")
DESIGNS = ("grid", "few cells", "one batch size", "decode only", "log")


@dataclass(frozen=True)
class System:
    """A law, its parameters, what its steps look like, the noise of ln T, and how many rows are measured."""

    family: str
    theta: FloatArray
    design: str
    noise: float
    rows: int
    seed: int

    def steps(self, n: int, rng: np.random.Generator) -> dict[str, FloatArray]:
        """Steps of the design (n,)."""
        largest = float(2 ** np.random.default_rng(self.seed).integers(3, 8))
        octaves = int(np.log2(largest))
        B = 2.0 ** rng.integers(0, octaves + 1, n)
        S = B * 2.0 ** rng.integers(0, 9, n)
        if self.design == "few cells":
            cells = np.random.default_rng(self.seed).integers(0, 9, (6, 2))
            which = cells[rng.integers(0, 6, n)]
            B = 2.0 ** np.minimum(which[:, 0], octaves)
            S = B * 2.0 ** which[:, 1]
        elif self.design == "one batch size":
            B, S = np.ones(n), 2.0 ** rng.integers(0, 12, n)
        elif self.design == "decode only":
            B = rng.integers(1, int(largest) + 1, n).astype(np.float64)
            S = B
        elif self.design == "log":
            B = rng.integers(1, int(largest) + 1, n).astype(np.float64)
            S = np.where(rng.random(n) < 0.3, B + rng.integers(1, 2048, n), B)
        columns = {"B": B, "S": S}
        if self.family in ("context", "roofline"):
            columns["context_tokens"] = B * rng.integers(16, 4096, n)
        return columns

    def typical_ms(self, steps: dict[str, FloatArray]) -> FloatArray:
        return np.asarray(FAMILY[self.family].latency_ms(self.theta, StepTable(steps)), dtype=np.float64)

    def trace(self) -> Trace:
        """Measured rows: noise, and one pause in a hundred where there are many."""
        rng = np.random.default_rng(self.seed + 1)
        steps = self.steps(self.rows, rng)
        T = self.typical_ms(steps) * np.exp(rng.normal(0, self.noise, self.rows))
        if self.rows >= 200:
            T = np.where(rng.random(self.rows) < 0.01, T * rng.uniform(2, 20, self.rows), T)
        return Trace({**steps, "T_ms": T})


def a_system(seed: int) -> System:
    """A random system, by its number."""
    rng = np.random.default_rng(10_000 + seed)
    family = str(rng.choice(FAMILIES))
    theta = _THETA[family](rng)
    rows = round(float(np.exp(rng.uniform(np.log(8), np.log(5000)))))
    noise = float(rng.choice([0.0, 0.01, 0.03, 0.1, 0.3]))
    return System(family, theta, str(rng.choice(DESIGNS)), noise, rows, 7 * seed)


def _vector(family: str, **values: float) -> FloatArray:
    known = {p.name: p.fixed if p.fixed is not None else 0.0 for p in FAMILY[family].parameters}
    known |= {p.name: 1.0 for p in FAMILY[family].parameters if p.positive and p.fixed is None}
    return np.array([float(value) for value in (known | values).values()])


def _up_to(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _saturation(rng: np.random.Generator) -> dict[str, float]:
    return {
        "tau_0": _up_to(rng, 0.1, 20),
        "w_0": float(rng.choice([0, 5, 50])),
        "P_max": _up_to(rng, 2, 200),
        "k_B": _up_to(rng, 0.05, 2),
        "k_S": _up_to(rng, 2e-3, 0.2),
        "tau_B": _up_to(rng, 1e-3, 0.1),
        "tau_S": float(rng.choice([0, 1e-3, 1e-2])),
    }


def _line(rng: np.random.Generator) -> dict[str, float]:
    return {"tau_0": _up_to(rng, 0.1, 30), "tau_B": _up_to(rng, 1e-3, 1), "tau_S": _up_to(rng, 1e-4, 0.1)}


_THETA: dict[str, Callable[[np.random.Generator], FloatArray]] = {
    "constant": lambda rng: _vector("constant", tau_0=_up_to(rng, 1e-3, 1e3)),
    "linear": lambda rng: _vector("linear", **_line(rng)),
    "saturation": lambda rng: _vector("saturation", **_saturation(rng)),
    "hinge": lambda rng: _vector("hinge", **_line(rng), b=_up_to(rng, 1e-3, 0.1), S_0=_up_to(rng, 16, 512)),
    "quadratic": lambda rng: _vector("quadratic", **_line(rng), tau_A=_up_to(rng, 1e-8, 1e-6)),
    "context": lambda rng: _vector("context", **_saturation(rng), tau_K=_up_to(rng, 1e-6, 1e-4), tau_L=3e-5),
    "roofline": lambda rng: _vector(
        "roofline",
        tau_0=_up_to(rng, 0.1, 10),
        tau_B=_up_to(rng, 1e-3, 0.1),
        b=_up_to(rng, 3e-3, 0.1),
        S_0=_up_to(rng, 32, 512),
        tau_K=_up_to(rng, 1e-6, 1e-4),
        tau_L=3e-5,
    ),
}


@dataclass(frozen=True)
class Scored:
    """A system with what was chosen, why it failed (empty where it did not), and the errors in percent of auto and of
    the better of a line and the truth's family."""

    system: System
    chosen: str
    failure: str
    own: float
    best: float

    @property
    def ratio(self) -> float:
        return (self.own + ALLOWANCE_PCT) / (self.best + ALLOWANCE_PCT)


def scored(system: System) -> Scored:
    """Auto on a system, beside a line and the truth's family."""
    trace, asked = system.trace(), system.steps(ASKED, np.random.default_rng(system.seed + 2))
    noise = np.random.default_rng(system.seed + 3).normal(0, system.noise, ASKED)
    truth = system.typical_ms(asked) * np.exp(noise)
    try:
        fit = fit_trace(trace)
        if not fit.status.ok:
            return Scored(system, fit.model, fit.status.code, np.inf, 0.0)
        T = fit.latency_ms(**asked)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return Scored(system, "", f"{type(error).__name__}: {error}", np.inf, 0.0)
    own = _error(T, truth)
    others = [fit_trace(trace, FitOptions(name)).latency_ms(**asked) for name in {"linear", system.family}]
    return Scored(system, fit.model, "" if np.isfinite(own) else "no finite answer", own, _least(others, truth))


def _error(T: FloatArray, truth: FloatArray) -> float:
    return float(np.mean(np.abs(T - truth) / truth)) * 100


def _least(others: list[FloatArray], truth: FloatArray) -> float:
    return min(_error(T, truth) for T in others)


def main(smoke: bool = False, systems: int = SYSTEMS) -> list[Scored]:
    """Print the table by number of rows, failures and the worst ratios; all results."""
    found = [scored(a_system(seed)) for seed in range(12 if smoke else systems)]
    failures = [each for each in found if each.failure]
    print(f"planted systems: {len(found)}, failures {len(failures)}")
    for low, high in ((8, 30), (30, 100), (100, 1000), (1000, 5001)):
        ratios = [each.ratio for each in found if low <= each.system.rows < high]
        if ratios:
            median, most = np.quantile(ratios, [0.5, 0.95])
            print(f"  {low}..{high - 1} rows: {len(ratios)} systems, ratio median {median:.2f}, p95 {most:.2f}")
    for each in failures + sorted(found, key=lambda one: -one.ratio)[:10]:
        s = each.system
        print(
            f"  {s.family}, {s.design}, {s.rows} rows, noise {s.noise:g}: {each.chosen} {each.own:.3g} %"
            f" against {each.best:.3g} % {each.failure}"
        )
    return found


if __name__ == "__main__":
    counts = [int(text) for text in sys.argv[1:] if text.isdigit()]
    main("--smoke" in sys.argv[1:], counts[0] if counts else SYSTEMS)
