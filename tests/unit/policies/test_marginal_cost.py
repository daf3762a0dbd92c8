"""The marginal-cost rules by enumeration and in closed form; the optimal table as a rule."""

import math

import pytest
from hypothesis import given, strategies as st

from latfit.errors import WrongUsage
from latfit.policies.marginal_cost import stopping_batch
from latfit.policies.policy import DispatchTable


def line(tau: float, alpha: float, largest: int = 400) -> list[float]:
    return [tau + alpha * b for b in range(1, largest + 1)]


class TestStopping:
    @pytest.mark.parametrize(("product", "amortised", "total"), [(4, 2, 4), (16, 4, 16)])
    def test_published(self, product: float, amortised: int, total: int) -> None:
        T, rate = line(8, 0.05), product / 8
        assert stopping_batch("amortised", T, rate) == amortised
        assert stopping_batch("total delay", T, rate) == total
        assert stopping_batch("literal", T, rate) == 1

    @given(st.floats(0.1, 20), st.floats(0.001, 5), st.floats(0.01, 10))
    def test_closed_forms(self, tau: float, alpha: float, rate: float) -> None:
        T, x = line(tau, alpha), rate * tau
        root = (math.sqrt(1 + 4 * x) - 1) / 2
        if abs(root - round(root)) > 1e-6:
            assert stopping_batch("amortised", T, rate) == max(1, math.ceil(root))
        if abs(x - round(x)) > 1e-6:
            assert stopping_batch("total delay", T, rate) == max(1, math.ceil(x))
        assert stopping_batch("literal", T, rate) == 1

    def test_the_literal_rule_waits_only_where_batches_get_faster(self) -> None:
        assert stopping_batch("literal", [9.0, 6.0, 5.9, 7.0], 1) == 2

    def test_refused(self) -> None:
        with pytest.raises(WrongUsage, match="rule"):
            stopping_batch("best", [1.0], 1)
        for T, rate in (([], 1.0), ([1.0], 0.0), ([1.0], math.nan)):
            with pytest.raises(WrongUsage):
                stopping_batch("literal", T, rate)


class TestTable:
    def test_takes(self) -> None:
        table = DispatchTable((0, 0, 2, 3), rate=0.5, max_batch=3)
        assert [table.takes(q) for q in (0, 1, 2, 3, 9)] == [0, 0, 2, 3, 3]
        assert table.threshold == 2

    @pytest.mark.parametrize("batches", [(), (0, 2), (0, 1, 2, 3, 4), (0, 1, 0), (0, -1, 1)])
    def test_refused(self, batches: tuple[int, ...]) -> None:
        with pytest.raises(WrongUsage, match="table"):
            DispatchTable(batches, 0.5, 3)
