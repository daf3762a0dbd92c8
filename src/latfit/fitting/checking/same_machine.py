"""Check whether measured steps come from the machine that a fit describes: docs/theory/fitting.md, "Same machine".

Evidence is facts and, by phase, the median of ln(observed/predicted) against the fit's 98 % limits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latfit.errors import FitNotUsable
from latfit.fitting.checking.conformal import Scores
from latfit.fitting.checking.crossval import HeldOut
from latfit.fitting.data import FitData, fit_data
from latfit.model import CONTEXT, FitResult, StepTable, fitted_identity, step_draws
from latfit.stats import FloatArray, weighted_quantiles
from latfit.trace import Fact, Trace, facts_beside, identity_of

Residuals = Literal["off", "scattered", "shifted", "as fitted", "too few"]
State = Literal["same", "shifted", "other", "unknown"]

Z_99 = 2.5758
LEVELS: Mapping[float, float] = {0.99: 1.0, 0.95: 2.326 / 1.645, 0.9: 2.326 / 1.282}
"""One-sided levels in order of preference, and the normal quantile at 99 % over that at the level."""
MIN_INDEPENDENT = 2.0  # steps for a verdict: two outside the limits by chance have probability 0.02² = 0.04 %
MATERIAL, CLOSE = math.log(1.05), 1.1
MAX_BEYOND = 0.25  # share of steps beyond the limits; 2 % of the fit's own steps are
COMPARED_STEPS = 400  # evenly spaced, for the curves of the parameter draws
ADVISORY = ("engine_version", "isa")  # facts that may differ on one machine: reported, but no reason to reject steps


@dataclass(frozen=True)
class PhaseShift:
    phase: str
    steps: int
    independent: float  # number of independent samples
    ratio: float  # latency relative to the fitted machine, with its 99 % interval
    low: float
    high: float
    inside: float | None  # share within the fit's 98 % limits of single steps; None if the fit has no limits
    residuals: Residuals  # verdict on the phase

    @property
    def close(self) -> bool:
        """Whether the latency agrees with the fitted machine within 10 %, at 99 % confidence."""
        return self.residuals == "as fitted" and self.low >= 1 / CLOSE and self.high <= CLOSE

    @property
    def sentence(self) -> str:
        """`2.3 times slower in decode`, `as fitted in prefill`."""
        if self.residuals in ("as fitted", "too few"):
            return f"{self.residuals} in {self.phase}"
        if self.residuals == "scattered":
            beyond = "" if self.inside is None else f"{100 * (1 - self.inside):.0f} % of the "
            return f"{beyond}steps in {self.phase} are further off than the fit's intervals say"
        factor = max(self.ratio, 1 / self.ratio)
        much = f"{factor:.3g} times" if factor >= 2 else f"{100 * abs(self.ratio - 1):.0f} %"
        return f"{much} {'slower' if self.ratio > 1 else 'faster'} in {self.phase}"


@dataclass(frozen=True)
class MachineCheck:
    """Evidence on whether a fit and steps are of one machine."""

    facts: Sequence[Fact]  # facts of fit and trace, compared by name
    phases: Sequence[PhaseShift]  # comparison of each phase
    measured: int  # steps inside the measured range
    steps: int

    @property
    def differing(self) -> list[Fact]:
        return [fact for fact in self.facts if fact.agreement == "differs"]

    @property
    def state(self) -> State:
        """`same`, `shifted` (within the intervals, beyond chance), `other` machine, or `unknown`."""
        judged = [phase for phase in self.phases if phase.residuals != "too few"]
        found = {phase.residuals for phase in judged}
        differs = any(fact.name not in ADVISORY for fact in self.differing)
        proven = bool(judged) and all(phase.close for phase in judged)
        if found & {"off", "scattered"} or (differs and not proven):
            return "other"
        if not found:
            return "unknown"
        return "shifted" if "shifted" in found or differs else "same"

    @property
    def verdict(self) -> str:
        apart = [f"{_name(fact.name)} differs: {fact.found} vs {fact.fitted}" for fact in self.differing]
        moved = [phase.sentence for phase in self.phases if phase.residuals not in ("too few", "as fitted")]
        within = [f"{', '.join(moved)}, within the fit's intervals" if moved else "they take as long as the fit says"]
        few = f"{self.measured:,} of {self.steps:,} steps lie inside the fit's measured range, too few independent ones"
        but = f" ({'; '.join(apart)})" if apart else ""
        verdicts = {
            "other": f"These steps are not of the fitted machine: {'; '.join([*moved, *apart])}.",
            "unknown": f"Whether these steps are of the fitted machine cannot be told: {few}.",
            "shifted": f"These steps may be of the fitted machine: {'; '.join([*within, *apart])}.",
            "same": f"These steps are of the fitted machine, as far as the data tell{but}.",
        }
        return verdicts[self.state]

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "verdict": self.verdict,
            "facts": {fact.name: {**asdict(fact), "agreement": fact.agreement} for fact in self.facts},
            "phases": {phase.phase: {k: v for k, v in asdict(phase).items() if k != "phase"} for phase in self.phases},
            "measured_steps": self.measured,
            "steps": self.steps,
        }


def check_alike(fits: Mapping[str, FitResult], names: Sequence[str] = ("model",)) -> None:
    """Check that fits used together agree in the named facts, as far as they have them. Raises FitNotUsable."""
    known = {name: fitted_identity(fit) for name, fit in fits.items()}
    for fact in names:
        said = [(name, facts[fact]) for name, facts in known.items() if facts.get(fact)]
        for name, value in said[1:]:
            if Fact(fact, said[0][1], value).agreement == "differs":
                raise FitNotUsable(
                    f"{_name(fact)} differs: {said[0][0]} is of {said[0][1]}, {name} of {value}",
                    where=f"{said[0][0]}, {name}",
                    remedy="Give fits of one machine and model; --force takes these together all the same.",
                )


def same_machine(fit: FitResult, trace: Trace) -> MachineCheck:
    """Check whether the steps of a clean trace come from the machine of a fit."""
    data = fit_data(trace)
    read = [name for name in dict.fromkeys(("B", "S", *fit.columns)) if name in fit.domain and name in data.steps]
    steps = StepTable({name: data.steps[name] for name in read})
    facts = facts_beside(fitted_identity(fit), identity_of(trace))
    total = round(float(data.weights.sum()))
    if fit.reads_context and CONTEXT not in steps and not fit.typical:
        return MachineCheck(facts, [], 0, total)
    inside = ~fit.outside_domain(**steps)
    ratio = np.log(data.observed / fit.latency_ms(**steps))
    phases = [_shift(fit, data, steps, str(phase), inside, ratio) for phase in np.unique(data.phase[inside])]
    measured = round(float(data.weights[inside].sum()))
    return MachineCheck(facts, phases, measured, total)


def _shift(
    fit: FitResult, data: FitData, steps: StepTable, phase: str, inside: NDArray[np.bool_], ratio: FloatArray
) -> PhaseShift:
    rows = np.flatnonzero(inside & (data.phase == phase))
    ratio, weights = ratio[rows], data.weights[rows]
    left_out = HeldOut(rows, np.zeros(len(rows), dtype=np.int64), ratio, weights)
    scores = Scores.of(data, left_out, data.in_time)
    n = max(scores.independent, 1e-9)
    part = min(Z_99 / (2 * math.sqrt(n)), 0.5)
    middle, low, high = weighted_quantiles(ratio, [0.5, 0.5 - part, 0.5 + part], weights)
    common = Z_99 * _common_error(fit, steps.at(rows))
    low, high = middle - math.hypot(middle - low, common), middle + math.hypot(high - middle, common)
    residuals: Residuals = "too few"
    centre, share = 0.0, None
    if (limits := _limits(fit, phase)) is not None:
        centre, lower, upper = limits
        nearest, farthest = _context_reach(fit, steps.at(rows))
        lower, upper = lower + nearest, upper + farthest
        share = float(np.average((ratio >= lower) & (ratio <= upper), weights=weights))
        beyond = (ratio < lower - math.log(CLOSE)) | (ratio > upper + math.log(CLOSE))
        far = float(np.average(beyond, weights=weights))
        if n >= MIN_INDEPENDENT and (low > upper or high < lower):
            residuals = "off"
        elif n >= MIN_INDEPENDENT and far - Z_99 * math.sqrt(far * (1 - far) / n) > MAX_BEYOND:
            residuals = "scattered"
        elif part < 0.5:
            moved = (low > centre + farthest or high < centre + nearest) and abs(middle - centre) >= MATERIAL
            residuals = "shifted" if moved else "as fitted"
    ratio_of, low_of, high_of = (math.exp(value - centre) for value in (middle, low, high))
    return PhaseShift(phase, scores.steps, n, ratio_of, low_of, high_of, share, residuals)


def _limits(fit: FitResult, phase: str) -> tuple[float, float, float] | None:
    """Return (median, lower, upper 98 % limit) of ln(observed/predicted) of single steps; None if the fit has none."""
    own = fit.limits
    for level, wider in LEVELS.items():
        lower, upper = (own.pooled_factor(phase, level, side) for side in ("lower", "upper"))
        if lower is not None and upper is not None:
            ends = np.log([lower, upper])
            medians = [own.pooled_factor(phase, 0.5, side) or 1.0 for side in ("lower", "upper")]
            centre = float(np.mean(np.log(medians)))
            low, high = (centre + wider * (ends - centre)).tolist()
            return centre, low, high
    return None


def _common_error(fit: FitResult, steps: StepTable) -> float:
    """Return the standard deviation of the median ln T of steps over the parameter draws."""
    n = len(steps["B"])
    few = steps.at(np.linspace(0, n - 1, min(n, COMPARED_STEPS)).astype(np.intp))
    drawn = step_draws(fit, few)
    return 0.0 if drawn is None else float(np.std(np.median(np.log(drawn / fit.latency_ms(**few)), axis=1)))


def _context_reach(fit: FitResult, steps: StepTable) -> tuple[float, float]:
    """Return how far zero and the largest measured context shift the median ln T, if steps lack the context."""
    if not fit.reads_context or CONTEXT in steps:
        return 0.0, 0.0
    T, n = fit.latency_ms(**steps), len(steps["B"])
    ends = (fit.latency_ms(**steps, context_tokens=np.full(n, float(end))) for end in (0.0, fit.domain[CONTEXT][1]))
    low, high = (float(np.median(np.log(end / T))) for end in ends)
    return min(low, 0.0), max(high, 0.0)


def _name(fact: str) -> str:
    return {"tp": "tensor parallelism", "isa": "instruction set", "dtype": "number type"}.get(
        fact, fact.replace("_", " ")
    )
