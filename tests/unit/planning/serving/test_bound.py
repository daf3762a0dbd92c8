"""The bound where an interval has no end, against worlds whose percentile is known in closed form."""

import math
from typing import Any

import numpy as np
import pytest

from latfit.planning.serving.targets import RequestTarget
from latfit.simulation import bound_of, interval_of

WORLDS = 300


def _levels(rng: np.random.Generator) -> list[np.ndarray]:
    """Replications that lie each at a level of its own, exponential with mean 1: as different as they can be."""
    return [rng.exponential() + 0.001 * rng.random(500) for _ in range(8)]


@pytest.mark.parametrize("share", [0.9, 0.99])
def test_what_has_no_upper_end_is_below_the_bound(share: float) -> None:
    rng = np.random.default_rng(11)
    truth = -math.log(1 - share)
    worlds = [_levels(rng) for _ in range(WORLDS)]
    assert all(math.isnan(interval_of(each, share).high) for each in worlds)
    broken = sum(bound_of(each, share) < truth for each in worlds) / WORLDS
    # Eight draws do not tell the moments of an exponential exactly: what 5 % promise, within three standard errors.
    assert broken <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / WORLDS)


def test_a_limit_far_above_all_that_was_seen_is_kept_for_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of 20 to 21 ms, each replication at a level of its own: a limit of 60 ms is kept, one of 21.5 ms unsure."""
    rng = np.random.default_rng(3)
    runs = [20 + rng.random() + 0.01 * rng.random(500) for _ in range(8)]
    monkeypatch.setattr(RequestTarget, "times", lambda self, run, warmup: run)
    as_runs: list[Any] = list(runs)
    far, near = (RequestTarget("tpot", limit).reached(as_runs, 0.0) for limit in (60.0, 21.5))
    assert math.isnan(far.high)
    assert (far.met, far.certain, near.met, near.certain) == (True, True, True, False)
