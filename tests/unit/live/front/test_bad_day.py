"""Every request of a bad day gets one answer, its own."""

import pytest

from tests.unit.live.front.bad_day import bad_day


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_gets_one_answer_which_is_its_own(seed: int) -> None:
    ended = bad_day(600, seed)
    assert set(ended) <= {"200", "429", "500", "502", "503", "504", "left", "cut off"}
    assert ended["200"] > 30  # hundreds on a quiet machine
