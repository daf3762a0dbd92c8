"""What is said of a plan of serving engines."""

import pytest

from latfit.planning import Reached
from latfit.planning.serving.result import Effect
from latfit.reporting.plan.serving import effect_bars


@pytest.mark.parametrize(
    ("value", "said"), [(21.64, "21.6 ms of 22 ms"), (22.013, "22.013 ms of 22 ms"), (22.0, "22 ms of 22 ms")]
)
def test_a_figure_that_is_not_its_limit_does_not_look_like_it(value: float, said: str) -> None:
    assert Reached(name="p99 TPOT", value_ms=value, limit_ms=22.0).outcome == f"p99 TPOT {said}"


def test_bars_are_as_long_as_their_values() -> None:
    effects = [
        Effect(change="decode 20 % faster", target="p99 TPOT", before_ms=40.0, after_ms=30.0),
        Effect(change="1 replica fewer", target="p99 TPOT", before_ms=40.0, after_ms=80.0),
    ]
    assert effect_bars(effects) == [
        ("unchanged", "40 ms", 50.0),
        ("decode 20 % faster", "30 ms", 37.5),
        ("1 replica fewer", "80 ms", 100.0),
    ]
    assert effect_bars([]) == []
