"""What is said of a plan of serving engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from latfit.planning import Reached
from latfit.reporting.plan.serving import verdict


@pytest.mark.parametrize(
    ("value", "said"), [(21.64, "21.6 ms of 22 ms"), (22.013, "22.013 ms of 22 ms"), (22.0, "22 ms of 22 ms")]
)
def test_a_figure_that_is_not_its_limit_does_not_look_like_it(value: float, said: str) -> None:
    plan: Any = SimpleNamespace(
        feasible=True, reached=[Reached("p99 TPOT", value, value, value, 22.0)], users=None, rate_per_s=12.0,
        what="a request is 2,000 prompt and 300 output tokens", replicas=14, unsupported=[], promise="yes",
    )  # fmt: skip
    assert verdict(plan).endswith(f"p99 TPOT {said}.")
