"""What is said of a plan of serving engines."""

import pytest

from latfit.planning import Reached


@pytest.mark.parametrize(
    ("value", "said"), [(21.64, "21.6 ms of 22 ms"), (22.013, "22.013 ms of 22 ms"), (22.0, "22 ms of 22 ms")]
)
def test_a_figure_that_is_not_its_limit_does_not_look_like_it(value: float, said: str) -> None:
    assert Reached(name="p99 TPOT", value_ms=value, limit_ms=22.0).outcome == f"p99 TPOT {said}"
