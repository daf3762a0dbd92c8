"""What measured steps have of their own: planted variances, a mixed model by statsmodels, visits that share noise."""

from collections.abc import Mapping

import numpy as np
import pytest
import statsmodels.api as sm
from numpy.typing import NDArray

from latfit.fitting.checking.roughness import chosen_correction
from latfit.fitting.correction import Smoothing, grid_of, learnt
from latfit.fitting.data import FitData, fit_data
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, formula_of, log_ratios
from latfit.fitting.repeats import FEWEST, OwnOfSteps, own_of_steps, visits_of
from latfit.fitting.solver.solve import solved_once
from latfit.model import fit_from_json
from latfit.stats import FloatArray
from latfit.trace import Trace

STEPS, TAU, SIGMA = 40, 0.05, 0.02


def planted(
    visits: int, rows: int = 1, tau: float = TAU, own: float = 0.0, seed: int = 0
) -> tuple[NDArray[np.intp], NDArray[np.intp], FloatArray, FloatArray]:
    """(step, visit, log ratio of each row, what its step has of its own). own: scatter of rows within a visit."""
    rng = np.random.default_rng(seed)
    visit = np.repeat(np.arange(STEPS * visits), rows)
    step = visit // visits
    a, d = rng.normal(0, tau, STEPS)[step], rng.normal(0, SIGMA, STEPS * visits)[visit]
    return step, visit, a + d + rng.normal(0, own, len(step)), a


def gained(own: OwnOfSteps) -> float:
    """Points of error, where nothing keeps T from falling."""
    gain = own.gain(*np.zeros((2, len(own.value))))
    return gain.before - gain.after


@pytest.mark.filterwarnings("ignore:The MLE may be on the boundary")
def test_is_the_prediction_of_a_mixed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By restricted likelihood, which a balanced design has in common with the analysis of variance."""
    monkeypatch.setattr("latfit.fitting.repeats.HUBER", np.inf)
    step, _, off, _ = planted(4)
    off = off - off.mean()
    own = own_of_steps(visits_of(step, None, off))
    model = sm.MixedLM(off, np.ones((len(off), 1)), groups=step).fit(reml=True)
    expected = np.array([float(model.random_effects[number].iloc[0]) for number in range(STEPS)])
    assert own is not None
    # its constant costs one degree of freedom of 40, of a shrinkage by 4 %
    assert own.value[::4] == pytest.approx(expected, abs=TAU / STEPS / 5)


@pytest.mark.parametrize("seed", range(5))
def test_visits_left_out_are_nearer_by_what_variances_say(seed: int) -> None:
    step, _, off, _ = planted(4, seed=seed)
    own = own_of_steps(visits_of(step, None, off))
    assert own is not None
    # |N(0, s)| has the mean 0.8 s; of three others with noise of their own the mean is off by a third of a variance
    gain = own.gain(*np.zeros((2, len(off))))
    expected = 80 * np.sqrt(TAU**2 + SIGMA**2), 80 * np.sqrt(SIGMA**2 * 4 / 3)
    assert gain.before == pytest.approx(expected[0], abs=4 * 80 * TAU / np.sqrt(2 * STEPS))
    assert gain.after == pytest.approx(expected[1], rel=0.25)
    assert gain.error == pytest.approx(60 * TAU / np.sqrt(STEPS), rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_repeats_in_a_row_count_as_one(seed: int) -> None:
    """Steps differ by nothing but what a visit shares: rows alone would call that their own."""
    step, visit, off, _ = planted(2, rows=5, tau=0.0, own=0.001, seed=seed)
    told = own_of_steps(visits_of(step, visit, off))
    assert told is None or abs(gained(told)) < 0.1
    naive = own_of_steps(visits_of(step, None, off))
    assert naive is not None
    assert gained(naive) > 0.1


def test_of_single_visits_nothing_is_told() -> None:
    step, visit, off, _ = planted(1, rows=6)
    assert own_of_steps(visits_of(step, visit, off)) is None
    few = step < FEWEST - 1
    assert own_of_steps(visits_of(step[few], None, off[few])) is None


def test_one_visit_while_the_machine_was_held_up_moves_nothing() -> None:
    step, _, off, a = planted(6)
    off[::6] += np.where(np.arange(STEPS) % 8 == 0, 1.0, 0.0)
    own = own_of_steps(visits_of(step, None, off))
    assert own is not None
    assert np.max(np.abs(own.value - a)) < 4 * SIGMA / np.sqrt(5)


@pytest.mark.parametrize("noisy", [False, True])
def test_repeats_without_noise_are_kept_whole(noisy: bool) -> None:
    """Where all of them agree, and where all but one visit do."""
    step, _, _, a = planted(3)
    off = a + np.where(noisy & (np.arange(len(a)) == 0), 0.5, 0.0)
    own = own_of_steps(visits_of(step, None, off))
    assert own is not None
    assert own.value == pytest.approx(a, abs=1e-6)


def test_visits_are_runs_of_repeats_in_time() -> None:
    B = np.array([1.0, 1, 2, 1, 2, 2, 1, 1])
    columns = {"B": B, "S": B, "T_ms": B, "run": np.repeat(["a", "b"], 4), "rep": np.arange(8.0)}
    order = np.array([3, 0, 1, 2, 4, 5, 6, 7])
    timed = Trace({**columns, "t_s": np.arange(8.0)}).select(order)
    data, untimed = fit_data(timed), fit_data(Trace(columns))
    found = data.visits(data.cell)
    assert found is not None
    assert found[np.argsort(order)].tolist() == [0, 0, 1, 2, 3, 3, 4, 4]
    assert untimed.visits(untimed.cell) is None


def test_nothing_is_added_where_nothing_was_measured() -> None:
    """At what was not measured the table says what it says without."""
    rng = np.random.default_rng(1)
    D, P = (x.ravel() for x in np.meshgrid([1.0, 2, 4, 8, 16, 32], [0.0, 64, 128, 256, 512, 1024]))
    kept = rng.random(len(D)) < 0.8
    d, p = np.repeat(D[kept], 6), np.repeat(P[kept], 6)
    T = (5 + 0.05 * d + 0.03 * p) * np.exp(np.repeat(rng.normal(0, 0.02, kept.sum()), 6) + rng.normal(0, 0.003, len(d)))
    steps = {"B": d + (p > 0), "S": d + p, "prefill_requests": (p > 0).astype(float), "prefill_tokens": p}
    data = fit_data(Trace({**steps, "T_ms": T}))
    ratio = np.log(T / (5 + 0.05 * d + 0.03 * p))

    def formula(columns: Mapping[str, FloatArray]) -> FloatArray:
        tokens = columns["prefill_tokens"]
        return np.asarray(5 + 0.05 * (columns["S"] - tokens) + 0.03 * tokens)

    rows, rough = np.arange(len(data)), (1.0, 1.0, 1.0)
    smooth = learnt(data, rows, ratio, Smoothing(rough, 0.5), formula)
    own = learnt(data, rows, ratio, Smoothing(rough, 0.5, (True, True, True)), formula)
    grid = grid_of(data)
    assert grid is not None
    assert grid.halved is not None
    assert len(own.nodes["prefill_tokens"]) == 2 * len(smooth.nodes["prefill_tokens"]) - 1
    between = [np.expm1((x[:-1] + x[1:]) / 2) for x in smooth.nodes.values()]
    left = [D[~kept], P[~kept]]
    for d_at, p_at in (np.meshgrid(*between), left):
        d_at, p_at = np.ravel(d_at), np.ravel(p_at)
        asked = {
            "B": d_at + (p_at > 0),
            "S": d_at + p_at,
            "prefill_requests": (p_at > 0).astype(float),
            "prefill_tokens": p_at,
        }
        assert own.of_steps(asked) == pytest.approx(smooth.of_steps(asked), abs=1e-9)
    assert np.mean(np.abs(own.of_steps(steps) - ratio)) < 0.5 * np.mean(np.abs(smooth.of_steps(steps) - ratio))


def test_a_fit_says_what_it_keeps() -> None:
    """Twenty-four steps, four visits each, and something that each step has of its own."""
    rng = np.random.default_rng(2)
    B = np.tile(np.repeat(np.arange(4.0, 100.0, 4.0), 3), 4)
    own = rng.normal(0, 0.03, 25)[(B / 4).astype(int)]
    T = (5 + 0.1 * B) * np.exp(own + np.repeat(rng.normal(0, 0.004, len(B) // 3), 3) + rng.normal(0, 0.002, len(B)))
    trace = Trace({"B": B, "S": B, "T_ms": T, "t_s": np.arange(len(B)) / 10, "rep": np.arange(len(B)) % 3})
    fit = fit_trace(trace, FitOptions("auto"))
    assert "keep what they have of their own" in (fit.cross_validation.selection or {})["reason"]
    measured = np.unique(B)
    told = fit.latency_ms(B=measured, S=measured) / (
        (5 + 0.1 * measured) * np.exp(own[np.unique(B, return_index=True)[1]])
    )
    assert np.mean(np.abs(told - 1)) < 0.006


def test_what_must_not_fall_is_not_promised() -> None:
    """Repeats without noise whose latency falls from batch to batch: what a fit says of repeats left out is what it
    then says of the steps."""
    B = np.repeat(np.arange(2.0, 62.0, 2.0), 5)
    T = (5 + 0.1 * B) * np.exp(np.repeat(np.random.default_rng(3).normal(0, 0.05, 30), 5))
    trace = Trace({"B": B, "S": B, "T_ms": T})
    data, options = fit_data(trace), FitOptions("linear")
    problem, found = solved_once(data, options)
    chosen = chosen_correction(data, options, problem.theta(found.z))
    assert chosen is not None
    assert chosen.own is not None
    fit = fit_trace(trace, FitOptions("linear+correction"))
    assert 100 * np.mean(np.abs(fit.latency_ms(B=B, S=B) / T - 1)) == pytest.approx(chosen.own[1], rel=0.1)


@pytest.mark.parametrize("context", [[1000.0, 4000.0, 100000.0, 100001.0], [101.4, 303.7, 1999.9]])
def test_values_close_together_are_stored_and_read(context: list[float]) -> None:
    """A token apart at a hundred thousand, and means that differ in their last bit."""
    rng = np.random.default_rng(4)
    D, K = (np.repeat(x.ravel(), 5) for x in np.meshgrid(np.arange(1.0, 9.0), context))
    T = (5 + 0.3 * D + 1e-4 * D * K) * np.exp(np.repeat(rng.normal(0, 0.04, len(D) // 5), 5))
    columns = {"B": D, "S": D, "context_tokens": D * K}
    fit = fit_trace(
        Trace({**columns, "T_ms": T * np.exp(rng.normal(0, 0.003, len(T)))}), FitOptions("context+correction")
    )
    assert fit.correction is not None
    again = fit_from_json(fit.to_json(), "here")
    assert again.latency_ms(**columns) == pytest.approx(fit.latency_ms(**columns), rel=1e-4)


@pytest.mark.parametrize("visits", [2, 3, 5])
def test_what_is_kept_is_as_near_as_planted_variances_allow(visits: int) -> None:
    """Squared error of the best linear prediction over tau^2: sigma^2 / (sigma^2 + n tau^2)."""
    rng, tau = np.random.default_rng(5), SIGMA / 2
    step = np.repeat(np.arange(3000), visits)
    a = rng.normal(0, tau, 3000)[step]
    own = own_of_steps(visits_of(step, None, a + rng.normal(0, SIGMA, len(step))))
    assert own is not None
    best = SIGMA**2 / (SIGMA**2 + visits * tau**2)
    assert np.mean((own.value - a) ** 2) / tau**2 == pytest.approx(best, rel=0.1)


def prefill_and_decode(seed: int) -> tuple[FitData, FloatArray]:
    """(steps, their true T in ms): of 1 to 40 that decode, and of nothing but the prefill of one prompt to four, each
    with something of its own and measured four times."""
    rng = np.random.default_rng(seed)
    P, n = (x.ravel() for x in np.meshgrid(np.geomspace(64, 1024, 9).round(), np.arange(1.0, 5.0)))
    D = np.append(np.arange(1.0, 41.0), 0 * P)
    P, n = np.append(np.zeros(40), P), np.append(np.zeros(40), n)
    T = (5 + 0.5 * D + 0.03 * P + 0.5 * n) * np.exp(rng.normal(0, 0.02, len(D)))
    columns = {"B": D + n, "S": D + P, "prefill_requests": n, "prefill_tokens": P}
    repeated = {name: np.repeat(x, 4) for name, x in columns.items()}
    T = np.repeat(T, 4)
    return fit_data(Trace({**repeated, "T_ms": T * np.exp(rng.normal(0, 0.004, len(T)))})), T


def test_steps_that_are_nothing_but_prefill_keep_what_is_theirs_on_their_grid() -> None:
    """On both grids, where each kind has something of its own: nearer to what was planted than a visit is."""
    data, T = prefill_and_decode(6)
    grid = grid_of(data)
    assert grid is not None
    assert grid.alone is not None
    options = FitOptions("roofline")
    problem, found = solved_once(data, options)
    chosen = chosen_correction(data, options, problem.theta(found.z))
    assert chosen is not None
    assert chosen.smoothing is not None
    assert chosen.smoothing.own == (True, True, False)
    off = log_ratios(problem, problem.theta(found.z), data)
    table = learnt(data, np.arange(len(data)), off, chosen.smoothing, formula_of(problem, problem.theta(found.z)))
    told = problem.model.latency_ms(problem.theta(found.z), data.steps) * np.exp(table.of_steps(data.steps))
    for steps in data.by_phase.values():
        assert np.mean(np.abs(told / T - 1)[steps]) < np.sqrt(2 / np.pi) * 0.004


def test_where_all_rows_leave_no_room_nothing_is_kept() -> None:
    """A choice made on some rows holds of all of them, whose grid may be too fine for nodes halfway."""
    few, rng = prefill_and_decode(7)[0], np.random.default_rng(7)
    P, n = np.geomspace(1, 1e6, 600), rng.permutation(np.geomspace(1, 1e4, 600))
    D = np.arange(1.0, 41.0)
    alone = {"prefill_requests": np.append(0 * D, n), "prefill_tokens": np.append(0 * D, P)}
    whole = fit_data(Trace({"B": np.append(D, n), "S": np.append(D, P), "T_ms": np.append(D, P), **alone}))
    rooms = grid_of(whole)
    assert rooms is not None
    assert rooms.alone is not None
    assert rooms.halved is not None
    assert rooms.alone.halved is None
    options = FitOptions("roofline")
    problem, found = solved_once(few, options)
    chosen = chosen_correction(few, options, problem.theta(found.z), whole=whole)
    assert chosen is not None
    assert chosen.smoothing is not None
    assert chosen.smoothing.own == (True, False, False)


def test_a_visit_ends_where_the_grid_has_another_step() -> None:
    """Mixed steps of as many tokens are one step of the grid, whether of one prompt or of two."""
    D, P = (x.ravel() for x in np.meshgrid([2.0, 4, 8, 16], [64.0, 128, 256]))
    D, P = np.repeat(D, 12), np.repeat(P, 12)
    n = np.tile([1.0, 2, 1, 2], len(D) // 4)
    steps = {"B": D + n, "S": D + P, "prefill_requests": n, "prefill_tokens": P}
    count = np.arange(len(D))
    data = fit_data(Trace({**steps, "T_ms": 5 + 0.1 * D + 0.03 * P, "t_s": count / 10, "rep": count % 12}))
    grid = grid_of(data)
    assert grid is not None
    visit = data.visits(grid.on_nodes)
    assert visit is not None
    assert np.array_equal(visit, count // 12)
