"""What a formula misses: planted misfits, a second way to solve, brute force for what must rise."""

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from latfit.errors import BadInput
from latfit.fitting.checking.correction_strength import choose_correction
from latfit.fitting.correction import (
    Smoothing,
    fit_correction,
    pool_adjacent,
)
from latfit.fitting.data import FitData, fit_data
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.fitting.solver.solve import solved_once
from latfit.model import FitResult, features_of
from latfit.stats import FloatArray
from latfit.trace import Trace

NOISE = 0.01


def steps(n: int, rng: np.random.Generator) -> dict[str, FloatArray]:
    """Decode and mixed steps of 1 to 64 requests and up to 1,024 prefill tokens."""
    D = rng.integers(1, 65, n).astype(float)
    P = np.where(rng.random(n) < 0.5, 0.0, rng.integers(16, 1025, n))
    return {"B": D + (P > 0), "S": D + P, "prefill_requests": (P > 0).astype(float), "prefill_tokens": P}


def truth(columns: dict[str, FloatArray], bump: float = 0.3, wave: bool = False) -> FloatArray:
    """A line with a step in ln T over prefill tokens (or a wave, so that T falls in places): no formula of latfit's."""
    T = 5 + 0.05 * columns["B"] + 0.03 * columns["S"]
    x = np.log1p(columns["prefill_tokens"])
    return T * np.exp(bump * (np.sin(3 * x) if wave else np.tanh(3 * (x - 5.5))))


def measured(n: int = 1500, seed: int = 1, bump: float = 0.3, wave: bool = False) -> Trace:
    rng = np.random.default_rng(seed)
    columns = steps(n, rng)
    return Trace({**columns, "T_ms": truth(columns, bump, wave) * np.exp(rng.normal(0, NOISE, n))})


def line(trace: Trace) -> tuple[FitData, FitOptions, FloatArray]:
    data, options = fit_data(trace), FitOptions("linear")
    problem, found = solved_once(data, options)
    return data, options, problem.theta(found.z)


def ape(fit: FitResult, columns: dict[str, FloatArray], T: FloatArray) -> float:
    return 100 * float(np.mean(np.abs(fit.latency_ms(**columns) / T - 1)))


@pytest.fixture(scope="module")
def corrected() -> FitResult:
    return fit_trace(measured(), FitOptions("linear+correction"))


def test_follows_a_planted_misfit_down_to_the_noise(corrected: FitResult) -> None:
    columns = steps(4000, np.random.default_rng(7))
    T = truth(columns)
    plain = fit_trace(measured(), FitOptions("linear"))
    assert ape(plain, columns, T) > 4
    assert ape(corrected, columns, T) < 100 * NOISE
    # of noisy rows that were left out: the noise's own mean error is 0.8 of its standard deviation, and cells at the
    # step are predicted from neighbours across it
    error = corrected.cross_validation.mape_pct
    assert error is not None
    assert 0.9 < error / (80 * NOISE) < 1.5


@pytest.mark.parametrize("seed", range(6))
def test_noise_alone_is_not_followed(seed: int) -> None:
    data, options, theta = line(measured(600, seed, bump=0.0))
    chosen = choose_correction(data, options, theta)
    assert chosen is not None
    assert chosen.smoothing is None
    plain = np.abs(np.expm1(-chosen.held_out.log_ratio)).mean()
    assert plain == pytest.approx(0.8 * NOISE, rel=0.15)


REPEATS = 6


def grid_steps(D: list[float], P: list[float], repeats: int = 1) -> dict[str, FloatArray]:
    """Every pair of decode requests and prefill tokens, each so many times in a row."""
    d, p = (np.repeat(x.ravel(), repeats) for x in np.meshgrid(D, P))
    return {"B": d + (p > 0), "S": d + p, "prefill_requests": (p > 0).astype(float), "prefill_tokens": p}


def repeated(cells: float, seed: int) -> tuple[Trace, FloatArray]:
    """(a grid of 25 cells measured six times each, the latency of each row without its noise). cells: how far each is
    off a line, in ln T, up and down by turns, so that none tells of its neighbours; T rises from each to the next all
    the same."""
    rng = np.random.default_rng(seed)
    columns = grid_steps([8.0, 32, 128, 512, 2048], [0.0, 256, 1024, 4096, 16384], REPEATS)
    T = truth(columns, bump=0.0) * np.exp(cells * np.repeat((-1.0) ** np.arange(25), REPEATS))
    return Trace({**columns, "T_ms": T * np.exp(rng.normal(0, NOISE, len(T)))}), T


@pytest.mark.parametrize("seed", range(3))
def test_repeated_cells_are_remembered_at_no_cost_to_their_neighbours(seed: int) -> None:
    trace, T = repeated(0.04, seed)
    plain, remembers = (fit_trace(trace, FitOptions(name)) for name in ("linear", "linear+correction"))
    columns = {name: trace.floats(name) for name in ("B", "S", "prefill_requests", "prefill_tokens")}
    # a mean of six is off by 0.8 of NOISE / sqrt(6), and cells are not wholly followed
    assert ape(plain, columns, T) > 3
    assert ape(remembers, columns, T) < 80 * NOISE
    between = grid_steps([12.0, 48, 192, 768], [384.0, 1536, 6144])
    unseen = truth(between, bump=0.0)
    assert ape(remembers, between, unseen) < ape(plain, between, unseen) + 100 * NOISE
    # what is told is of whole cells left out, of which the others say nothing
    error = remembers.cross_validation.mape_pct
    assert error is not None
    assert error > 3


@pytest.mark.parametrize("seed", range(3))
def test_the_stated_error_is_that_of_the_stored_table(seed: int) -> None:
    """Latency alternates by 12 % over prompt lengths an eighth of an octave apart, which the table may not follow."""
    rng = np.random.default_rng(seed)
    D, P = np.round(2.0 ** np.arange(0, 6, 0.5)), np.round(64 * 2.0 ** np.arange(0, 4, 0.125))
    columns = grid_steps(D.tolist(), P.tolist())
    sign = np.where(np.searchsorted(P, columns["prefill_tokens"]) % 2 == 0, 1.0, -1.0)
    T = truth(columns, bump=0.0) * np.exp(0.06 * sign + rng.normal(0, NOISE, len(sign)))
    trace, unseen = Trace({**columns, "T_ms": T}), rng.random(len(T)) < 0.25
    fit = fit_trace(trace.select(~unseen), FitOptions("linear+correction"))
    error = ape(fit, {name: column[unseen] for name, column in columns.items()}, T[unseen])
    assert error > 2  # of 5.9 % without a correction
    assert fit.cross_validation.mape_pct == pytest.approx(error, rel=0.08)


@pytest.mark.parametrize("bump", [0.3, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_auto_takes_it_where_it_pays(bump: float) -> None:
    assert fit_trace(measured(600, bump=bump), FitOptions("auto")).name.endswith("+correction") == (bump > 0)


def test_far_from_the_measured_steps_the_formula_speaks_alone(corrected: FitResult) -> None:
    far = {"B": np.array([200.0]), "S": np.array([9000.0]), "prefill_requests": np.ones(1)}
    far["prefill_tokens"] = far["S"] - far["B"] + 1
    formula = corrected.structure.latency_ms(corrected.theta, corrected.steps(**far))
    # an octave past the last measured step and further the table holds what keeps T from falling, and no more
    assert abs(np.log(corrected.latency_ms(**far) / formula))[0] < NOISE


def test_what_keeps_latency_from_falling_ends_where_the_formula_has_grown() -> None:
    """20 ms and 0.05 ms a request, a third more from 32 requests on: 30 ms at 64, which the formula passes at 200."""
    B = np.repeat(np.arange(1.0, 65.0), 6)
    T = (20 + 0.05 * B) * np.where(B >= 32, 4 / 3, 1.0) * np.exp(np.random.default_rng(0).normal(0, NOISE, len(B)))
    options = FitOptions("linear+correction", fixed={"tau_0": 20.0, "tau_B": 0.05, "tau_S": 0.0})
    fit = fit_trace(Trace({"B": B, "S": B, "T_ms": T}), options)
    assert fit.correction is not None
    asked = np.array([64.0, 90.0, 128.0, 1100.0])
    assert fit.latency_ms(asked[:1], asked[:1])[0] == pytest.approx(T[-6:].mean(), rel=0.03)
    assert np.all(np.diff(fit.latency_ms(asked, asked)) > -0.03 * 30)
    assert fit.latency_ms(asked[3:], asked[3:])[0] == pytest.approx(20 + 0.05 * 1100, rel=NOISE)


def test_it_ends_at_the_hull_of_the_measured_steps() -> None:
    """Many requests with few prefill tokens, few with many: of many with many nothing is known."""
    D, P = (axis.ravel() for axis in np.meshgrid(4.0 ** np.arange(4), 16 * 4.0 ** np.arange(4)))
    kept = np.repeat(np.log(D) + np.log(P / 16) <= np.log(64.1), 20)
    columns = {name: x[kept] for name, x in grid_steps(np.unique(D).tolist(), np.unique(P).tolist(), 20).items()}
    data = fit_data(Trace({**columns, "T_ms": 0.7 * truth(columns, bump=0.0)}))
    faster = np.full(len(data), np.log(0.7))
    table = fit_correction(data, faster, Smoothing((6, 6, 6), NOISE), lambda steps: truth(dict(steps), bump=0.0))
    assert table.of_steps(columns) == pytest.approx(faster, rel=0.25)
    corner = {name: np.full(1, x) for name, x in (("B", 65), ("S", 1088), ("prefill_requests", 1))}
    assert abs(table.of_steps({**corner, "prefill_tokens": np.full(1, 1024.0)}))[0] < NOISE


def test_a_formula_that_falls_itself_does_not_pull_beyond_the_data() -> None:
    """One request at a time; the formula, not measured for more, has two requests faster than one (1/(1 - e^(-k)))."""
    S = np.repeat(np.append(1.0, np.arange(16.0, 817.0, 16.0)), 3)
    T = (20 + 0.1 * S) * np.where(S > 400, 1.1, 1.0) * np.exp(np.random.default_rng(0).normal(0, NOISE, len(S)))
    fit = fit_trace(
        Trace({"B": np.ones(len(S)), "S": S, "T_ms": T}), FitOptions("saturation+correction", fixed={"k_B": 0.5})
    )
    assert fit.correction is not None
    far = fit.steps(np.ones(1), np.array([4000.0]))
    assert fit.latency_ms(**far)[0] == pytest.approx(fit.structure.latency_ms(fit.theta, far)[0], rel=NOISE)


def test_a_table_that_is_no_list_with_a_number_for_each_node_is_refused(corrected: FitResult) -> None:
    document = corrected.to_json()
    values = document["correction"]["log_factor"]
    for wrong in ([values], values[1:], [20.0, *values[1:]], [None, *values[1:]]):
        changed = {**document, "correction": {**document["correction"], "log_factor": wrong}}
        with pytest.raises(BadInput, match="correction: log_factor is not a list"):
            FitResult.from_json(changed, "a.fit.json")


def test_a_table_over_other_axes_is_refused(corrected: FitResult) -> None:
    document = corrected.to_json()
    table = document["correction"]
    nodes = table["nodes"]
    first, *others = nodes
    renamed = {"prefill_requests": nodes[first], **{name: nodes[name] for name in others}}
    turned = {name: nodes[name] for name in reversed(nodes)}
    alone = {**table, "prefill_alone": {**table, "nodes": nodes}}
    for wrong in ({**table, "nodes": renamed}, {**table, "nodes": turned}, alone):
        with pytest.raises(BadInput, match="no such axes: "):
            FitResult.from_json({**document, "correction": wrong}, "a.fit.json")


def test_interpolates_as_scipy_does(corrected: FitResult) -> None:
    from scipy.interpolate import RegularGridInterpolator

    table = corrected.correction
    assert table is not None
    columns = steps(500, np.random.default_rng(5))
    features = features_of(columns)
    known = RegularGridInterpolator(
        list(table.nodes.values()), table.log_factor.reshape([len(x) for x in table.nodes.values()])
    )
    axes = {"decode_requests": features["D"], "prefill_tokens": features["P"]}
    points = np.stack([np.log1p(axes[name]) for name in table.nodes], axis=1)
    assert table.of_features(features) == pytest.approx(known(points), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_latency_does_not_fall_as_work_grows_by_more_than_the_noise(seed: int) -> None:
    """The planted wave falls by a third in places: the table has to refuse that."""
    trace = measured(800, seed, wave=True)
    data, options, theta = line(trace)
    problem, _ = solved_once(data, options)
    log_ratio = np.log(data.observed / problem.model.latency_ms(theta, data.steps))
    smoothing = Smoothing((6, 6, 6), NOISE)
    table = fit_correction(data, log_ratio, smoothing, lambda columns: problem.model.latency_ms(theta, columns))
    P = np.arange(16.0, 4000.0)
    for D in (1.0, 8.0, 60.0, 150.0):
        columns = {"B": np.full(len(P), D + 1), "S": D + P, "prefill_requests": np.ones(len(P)), "prefill_tokens": P}
        T = problem.model.latency_ms(theta, columns) * np.exp(table.of_steps(columns))
        assert np.max(np.maximum.accumulate(T) / T - 1) < 1.1 * NOISE


def test_pooled_violators_are_an_isotonic_regression() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 30):
        values, weights = rng.normal(size=n), rng.random(n) + 0.01
        assert pool_adjacent(values, weights) == pytest.approx(isotonic_regression(values, weights=weights).x)
