"""A law by batch size: which batch has which points, its sums against the samples', what is drawn, stored and read."""

import bisect

import numpy as np
import pytest

from latfit.model.step_noise import Ratios, StepNoise, noise_from_json, ratios_of

RNG = np.random.default_rng(4)
SMALL, MIDDLE, LARGE = RNG.lognormal(0, 0.02, 700), RNG.lognormal(0.1, 0.3, 900), RNG.lognormal(0, 1, 400)
LOW, HIGH = np.array([1.0, 6.0, 40.0]), np.array([4.0, 32.0, 64.0])


def law_of(*samples: np.ndarray) -> StepNoise:
    return StepNoise(tuple(ratios_of(each, np.ones(len(each)), 1.0) for each in samples), np.sqrt(HIGH[:-1] * LOW[1:]))


def group_of(law: StepNoise, batch: float) -> Ratios:
    return law.groups[int(law.group_of(np.array([batch]))[0])]


@pytest.mark.parametrize("buckets", [[1, 2, 4, 8], [16, 64], [64], [3, 5, 48], [1, 40]])
def test_a_padded_batch_scatters_as_the_bucket_it_is_padded_to(buckets: list[int]) -> None:
    law = law_of(SMALL, MIDDLE, LARGE)
    for batch in range(1, buckets[-1] + 1):
        bucket = buckets[bisect.bisect_left(buckets, batch)]
        assert group_of(law.padded(buckets), batch).mean == group_of(law, bucket).mean


def test_json_gives_the_same_law_and_its_points_are_those_of_all_steps() -> None:
    law = law_of(SMALL, MIDDLE, LARGE)
    written = law.to_json()
    again = noise_from_json(written)
    assert again is not None
    assert again.pooled.values == pytest.approx(law.pooled.values, rel=1e-7)
    assert again.pooled.weights == pytest.approx(law.pooled.weights, rel=1e-7)
    assert [len(group.values) for group in again.groups] == [len(group.values) for group in law.groups]
    assert again.group_of(np.array([4.0, 5.0, 36.0])).tolist() == [0, 1, 2]
    # Who does not know groups reads the law of all steps.
    everything = noise_from_json({name: value for name, value in written.items() if name != "by_batch"})
    assert everything is not None
    assert np.all(np.diff(everything.pooled.values) >= 0)
    assert everything.pooled.mean == pytest.approx(law.pooled.mean, rel=1e-7)
