"""More or fewer requests over the same time: how many, when, and whose."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from latfit.workload import PrefixBlocks, Requests, make_requests


def crest(count: int = 4_000) -> Requests:
    rng = np.random.default_rng(0)
    times = np.sort(3_600_000 * rng.beta(3, 3, count))
    return make_requests(times, rng.integers(1, 900, count), 40, user_id=rng.integers(0, 7, count))


def test_once_is_the_recording_itself() -> None:
    day = crest()
    same = day.repeated(1.0, np.random.default_rng(1))
    for name in ("arrival_ms", "prompt_tokens", "output_tokens", "user_id"):
        np.testing.assert_array_equal(getattr(same, name), getattr(day, name))


@pytest.mark.parametrize("times", [0.3, 2.0, 2.5])
def test_every_hour_has_so_many_times_as_many(times: float) -> None:
    day = crest()
    more = day.repeated(times, np.random.default_rng(1))
    assert np.all(np.diff(more.arrival_ms) >= 0)
    assert more.arrival_ms[0] >= day.arrival_ms[0]
    assert more.arrival_ms[-1] <= day.arrival_ms[-1]
    edges = np.linspace(0, 3_600_000, 9)
    before, after = (np.histogram(each.arrival_ms, edges)[0] for each in (day, more))
    for many, once in zip(after, before, strict=True):
        # Whole copies are certain, the rest is binomial.
        assert abs(many - times * once) <= 4 * np.sqrt(max(once, 1) * 0.25) + 2 * times
    assert more.prompt_tokens.mean() == pytest.approx(day.prompt_tokens.mean(), rel=0.05)


def test_what_comes_again_shares_nothing_with_what_came() -> None:
    starts, ids = np.array([0, 2, 4, 5]), np.array([0, 1, 0, 2, 3])
    day = make_requests([0.0, 10.0, 20.0], 100, 5, user_id=[0, 0, 1])
    recorded = replace(day, prefix=PrefixBlocks(16, starts, ids))
    more = recorded.repeated(3.0, np.random.default_rng(0))
    assert len(more) == 9
    assert more.prefix is not None
    named = [tuple(more.prefix.ids[a:b]) for a, b in pairwise(more.prefix.starts)]
    assert sorted(named) == sorted(
        tuple(each + 4 * copy for each in ids[a:b]) for copy in range(3) for a, b in pairwise(starts)
    )
    # The first two share a user and a block, in each copy.
    assert len(set(more.user_id.tolist())) == 6
