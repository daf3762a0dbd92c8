"""Whether steps are of a fit's machine: planted slowdowns, loads and systems, of which the truth is known."""

import numpy as np
import pytest
from msgspec import structs

from latfit.errors import FitNotUsable
from latfit.fitting.checking.same_machine import MachineCheck, PhaseShift, Residuals, check_alike, same_machine
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_result import FitResult
from latfit.trace.table import Trace

NOISE = 0.05
SYSTEM = {"hardware": "h100", "model": "llama-7b", "tp": "1"}


def steps(
    seed: int, factor: float = 1.0, largest: float = 4096.0, n: int = 400, shared: float = 0.0, **system: str
) -> Trace:
    """Steps of T = 5 + 0.05 B + 0.01 S ms, half of them decode, in the order of time, with 5 % noise of which a share
    is an autoregression of lag-one correlation 0.95."""
    rng = np.random.default_rng(seed)
    B = rng.integers(1, 65, n).astype(float)
    S = np.where(rng.random(n) < 0.5, B, B + np.round(np.exp(rng.uniform(0, np.log(largest - 64), n))))
    slow, z = np.empty(n), rng.normal(0, 1, n)
    slow[0] = z[0]
    for i in range(1, n):
        slow[i] = 0.95 * slow[i - 1] + np.sqrt(1 - 0.95**2) * z[i]
    noise = NOISE * (np.sqrt(shared) * slow + np.sqrt(1 - shared) * rng.normal(0, 1, n))
    columns = {"B": B, "S": S, "T_ms": factor * (5 + 0.05 * B + 0.01 * S) * np.exp(noise), "t_s": np.arange(n) * 0.1}
    named = {name: np.full(n, value, dtype=object) for name, value in {**SYSTEM, **system}.items() if value}
    return Trace({**columns, **named})


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(steps(0, n=2000), FitOptions(model="linear"))


def residuals(found: MachineCheck) -> set[str]:
    return {phase.residuals for phase in found.phases}


class TestSteps:
    def test_the_same_machine_is_never_refused(self, fit: FitResult) -> None:
        """Of 60 traces of its machine, half of them with noise that neighbours share, none is refused and at most a
        few are called shifted: the interval of each of two phases is one of 99 %, and 5 % apart at least."""
        found = [same_machine(fit, steps(seed, shared=0.8 * (seed % 2))).state for seed in range(1, 61)]
        assert "other" not in found
        assert found.count("same") >= 57

    @pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.3])
    def test_another_speed_is_refused(self, fit: FitResult, factor: float) -> None:
        """98 % of single steps are within 2.33 x 5 % = 12 %; 20 % and more is beyond."""
        found = [same_machine(fit, steps(seed, factor)) for seed in range(1, 21)]
        assert {each.state for each in found} == {"other"}
        ratios = [phase.ratio for each in found for phase in each.phases]
        assert np.median(ratios) == pytest.approx(factor, rel=0.02)
        assert all(phase.low < factor < phase.high for each in found[:3] for phase in each.phases)

    def test_a_shift_within_the_intervals_is_told_and_not_refused(self, fit: FitResult) -> None:
        found = same_machine(fit, steps(1, 1.08))
        assert found.state == "shifted"
        assert "slower in decode" in found.verdict
        assert "within the fit's intervals" in found.verdict

    @pytest.mark.parametrize("factors", [(1.8, 1.0), (1.6, 1 / 1.6), (1.0, 0.5)])
    def test_steps_half_of_which_are_off_are_not_averaged(self, fit: FitResult, factors: tuple[float, float]) -> None:
        """The median step of the second lies within the limits, of the others at their edge."""
        for seed in range(1, 21):
            trace = steps(seed)
            factor = np.where(np.arange(len(trace)) % 2, *factors)
            found = same_machine(fit, trace.with_columns(T_ms=trace.floats("T_ms") * factor))
            assert found.state == "other"
            assert residuals(found) <= {"off", "scattered"}
            assert "not of the fitted machine: " in found.verdict


def test_steps_are_compared_with_the_median_of_the_limits(fit: FitResult) -> None:
    """A fit whose steps all took 1.2 times as long as it says, beside other such steps."""
    slower = {
        phase: {
            side: {q: f and 1.2 * f for q, f in entry[side].items()} for side in entry if side.endswith("quantiles")
        }
        for phase, entry in fit.intervals["by_phase"].items()
    }
    found = same_machine(structs.replace(fit, intervals={**fit.intervals, "by_phase": slower}), steps(1, 1.2))
    assert found.state == "same"
    assert [phase.ratio for phase in found.phases] == pytest.approx([1.0, 1.0], abs=0.02)


@pytest.mark.parametrize(
    ("residuals", "ratio", "inside", "sentence"),
    [
        ("as fitted", 1.01, 0.98, "as fitted in decode"),
        ("off", 2.3, 0.1, "2.3 times slower in decode"),
        ("off", 1 / 2.3, 0.1, "2.3 times faster in decode"),
        ("shifted", 1.08, 0.9, "8 % slower in decode"),
        ("off", 0.8, 0.1, "20 % faster in decode"),
        ("scattered", 1.0, 0.6, "40 % of the steps in decode are further off than the fit's intervals say"),
        ("scattered", 1.0, None, "steps in decode are further off than the fit's intervals say"),
    ],
)
def test_sentences(residuals: Residuals, ratio: float, inside: float | None, sentence: str) -> None:
    assert PhaseShift("decode", 100, 100.0, ratio, ratio, ratio, inside, residuals).sentence == sentence


def test_steps_without_the_context_that_a_fit_uses() -> None:
    """T = 5 + 0.05 B + 0.01 S + 0.001 K; the context of the steps that are checked was not recorded."""
    first, other = (steps(seed, n=800) for seed in (0, 1))
    context = first.floats("B") * np.random.default_rng(2).integers(10, 100, len(first))
    known = first.with_columns(T_ms=first.floats("T_ms") + 0.001 * context, context_tokens=context)
    fit = fit_trace(known, FitOptions(model="context"))
    assert fit.reads_context
    found = same_machine(fit, other.with_columns(T_ms=other.floats("T_ms") + 0.001 * 55 * other.floats("B")))
    assert found.state == "same"


class TestFacts:
    def test_what_differs_is_told_with_the_slowdown(self, fit: FitResult) -> None:
        found = same_machine(fit, steps(1, 2.3, hardware="NVIDIA A100-SXM4-80GB"))
        assert found.verdict.startswith("These steps are not of the fitted machine: 2.")
        assert "times slower in decode" in found.verdict
        assert "hardware differs: NVIDIA A100-SXM4-80GB vs h100" in found.verdict

    def test_an_engine_version_alone_refuses_nothing(self, fit: FitResult) -> None:
        """Engines are updated on one machine, and then their steps say what it did."""
        old, new = (steps(seed).with_provenance(vllm=version) for seed, version in ((0, "0.10.0"), (1, "0.11.0")))
        older = fit_trace(old, FitOptions(model="linear"))
        found = same_machine(older, new)
        assert found.state == "same"
        assert "engine version differs: 0.11.0 vs 0.10.0" in found.verdict

    def test_fits_of_two_models_are_not_used_together(self, fit: FitResult) -> None:
        other = fit_trace(steps(1, model="llama-70b"), FitOptions(model="linear"))
        check_alike({"path cpu": fit, "path gpu": fit})
        with pytest.raises(FitNotUsable, match="model differs: path cpu is of llama-7b, path gpu of llama-70b"):
            check_alike({"path cpu": fit, "path gpu": other})
