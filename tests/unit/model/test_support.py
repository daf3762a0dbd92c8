"""Where steps count as measured: inside grids of any spacing, not where a log has one odd step."""

import numpy as np
from numpy.typing import NDArray

from latfit.model.features import ROUNDING, Support, outside_by, support_of
from latfit.stats import FloatArray


def supported(support: Support, B: FloatArray, S: FloatArray, kinds: NDArray[np.str_]) -> NDArray[np.bool_]:
    return outside_by(support, B, S, kinds) <= ROUNDING


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
