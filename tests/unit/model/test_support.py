"""Where steps count as measured: inside grids of any spacing, not where a log has one odd step."""

import numpy as np
import pytest
from numpy.typing import NDArray

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.support import ROUNDING, Support, check_support, outside_by, read_by, support_of
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import planted_trace, rich_design


def supported(support: Support, B: FloatArray, S: FloatArray, kinds: NDArray[np.str_]) -> NDArray[np.bool_]:
    return outside_by(support, B, S, kinds) <= ROUNDING


def test_every_step_of_a_grid_and_what_lies_between_is_measured() -> None:
    B, S = rich_design()
    prefill = np.where(S > 1.5 * B, "prefill", "decode")
    support = support_of(B, S, prefill, np.ones(len(B)))
    assert supported(support, B, S, prefill).all()
    between = np.exp((np.log(B[:-1]) + np.log(B[1:])) / 2), np.exp((np.log(S[:-1]) + np.log(S[1:])) / 2)
    kept = between[1] >= between[0]
    alike = (prefill[:-1] == "prefill") & (prefill[1:] == "prefill") & kept
    assert supported(support, between[0][alike], between[1][alike], prefill[1:][alike]).all()


def test_one_odd_step_of_a_log_measures_nothing() -> None:
    rng = np.random.default_rng(0)
    B, S = rng.integers(7, 19, 200).astype(float), np.asarray(np.exp(rng.uniform(np.log(500), np.log(3000), 200)))
    B[0], S[0] = 1.0, 80.0
    all_prefill = np.full(200, "mixed")
    support = support_of(B, S, all_prefill, np.ones(200))
    asked_B, asked_S = np.array([10.0, 1.0, 1.0, 10.0]), np.array([1000.0, 300.0, 80.0, 80.0])
    assert supported(support, asked_B, asked_S, all_prefill[:4]).tolist() == [True, False, False, False]
    for kind in ("decode", "prefill"):
        assert not supported(support, asked_B, asked_S, np.full(4, kind)).any()
    unknown = np.full(4, "prefill or mixed")
    assert supported(support, asked_B, asked_S, unknown).tolist() == [True, False, False, False]
    assert supported({}, asked_B, asked_S, all_prefill[:4]).all()


def test_weights_count_as_steps() -> None:
    rng = np.random.default_rng(1)
    B = rng.integers(1, 30, 3000).astype(float)
    S = np.asarray(B + np.ceil(np.exp(rng.normal(5, 1, 3000))))
    prefill = np.full(3000, "prefill or mixed")
    by_row = support_of(B, S, prefill, np.ones(3000))
    cells, counts = np.unique(np.stack([B, S]), axis=1, return_counts=True)
    assert support_of(cells[0], cells[1], prefill[: len(counts)], counts.astype(float)) == by_row


def test_small_batches_at_the_end_of_a_load_tell_nothing_of_small_ones_with_little_context() -> None:
    rng = np.random.default_rng(3)
    busy, end = rng.integers(30, 65, 1500).astype(float), rng.integers(2, 30, 500).astype(float)
    B = np.concatenate([busy, end])
    each = np.concatenate([rng.uniform(50, 600, 1500), rng.uniform(500, 700, 500)])
    decoding = {"B": B, "S": B, "context_tokens": np.round(B * each)}
    support = support_of(B, B, np.full(2000, "decode"), np.ones(2000), read_by(decoding))
    asked = {"B": np.array([5.0, 5.0, 40.0, 40.0]), "S": np.array([5.0, 5.0, 40.0, 40.0])}
    reading = asked | {"context_tokens": asked["B"] * [600, 100, 100, 3000]}
    far = outside_by(support, asked["B"], asked["S"], np.full(4, "decode"), read_by(reading))
    assert (far > ROUNDING).tolist() == [False, True, False, True]
    assert far[3] == pytest.approx(np.log(3000 / 700), abs=0.1)
    assert read_by(asked) is None
    assert supported(support, asked["B"], asked["S"], np.full(4, "decode")).all()
    check_support(support)
    with pytest.raises(ValueError, match="decode is not 16 numbers"):
        check_support({"decode": support["decode"][:20]})


def test_a_request_in_prefill_reads_nothing_of_what_the_others_read() -> None:
    mixed = {"B": 4.0, "S": 103.0, "prefill_requests": 1.0, "prefill_tokens": 100.0, "context_tokens": 300.0}
    alone = {"B": 1.0, "S": 100.0, "prefill_requests": 1.0, "prefill_tokens": 100.0, "context_tokens": 50.0}
    told = [read_by({name: np.array([x]) for name, x in step.items()}) for step in (mixed, alone)]
    chunk = read_by({name: np.array([x]) for name, x in {**alone, "prefill_context_tokens": 50.0}.items()})
    assert [float(np.expm1(x[0])) for x in told if x is not None] == pytest.approx([100.0, 0.0], rel=0.04)
    assert chunk is not None
    assert float(np.expm1(chunk[0])) == pytest.approx(50.0, rel=0.04)


def test_a_fit_says_so_of_steps_unlike_its_own() -> None:
    rng = np.random.default_rng(2)
    B, S = rng.integers(8, 17, 300).astype(float), np.round(np.exp(rng.uniform(6, 8, 300)))
    B[0], S[0] = 1.0, 40.0
    trace = Trace({"B": B, "S": S, "T_ms": (5 + 0.1 * B + 0.02 * S) * np.exp(rng.normal(0, 0.02, 300))})
    fit = fit_trace(trace, FitOptions("linear"))
    np.testing.assert_array_equal(
        fit.outside_domain(np.array([10.0, 1.0, 10.0]), np.array([1000.0, 400.0, 5000.0])), [False, True, True]
    )
    grid = fit_trace(planted_trace(noise=0.03), FitOptions("linear"))
    assert not grid.outside_domain(*rich_design()).any()
