"""A law by batch size: which batch has which points, its sums against the samples', what is drawn, stored and read."""

import bisect
import math

import numpy as np
import pytest

from latfit.model.noise.step_noise import Ratios, StepNoise, noise_from_json, noise_of, ratios_of

RNG = np.random.default_rng(4)
SMALL, MIDDLE, LARGE = RNG.lognormal(0, 0.02, 700), RNG.lognormal(0.1, 0.3, 900), RNG.lognormal(0, 1, 400)
LOW, HIGH = np.array([1.0, 6.0, 40.0]), np.array([4.0, 32.0, 64.0])


def law_of(*samples: np.ndarray) -> StepNoise:
    return StepNoise(tuple(ratios_of(each, np.ones(len(each)), 1.0) for each in samples), np.sqrt(HIGH[:-1] * LOW[1:]))


def group_of(law: StepNoise, batch: float) -> Ratios:
    return law.groups[int(law.group_of(np.array([batch]))[0])]


def test_a_batch_is_of_the_group_that_is_nearest_in_its_logarithm() -> None:
    law = law_of(SMALL, MIDDLE, LARGE)
    measured = [(1, 0), (4, 0), (6, 1), (32, 1), (40, 2), (64, 2)]
    # Between 32 and 40: ln 35.78 is the middle. Between 4 and 6: ln 4.899.
    between = [(5, 1), (35, 1), (36, 2), (1000, 2)]
    for batch, group in measured + between:
        assert law.group_of(np.array([float(batch)])).tolist() == [group]


def test_sums_are_those_of_each_groups_sample() -> None:
    law = law_of(SMALL, MIDDLE, LARGE)
    batches = np.array([1.0, 10.0, 64.0])
    assert law.mean_ms(np.ones(1), batches) == pytest.approx([SMALL.mean(), MIDDLE.mean(), LARGE.mean()], rel=1e-12)
    cvs = [each.std() / each.mean() for each in (SMALL, MIDDLE, LARGE)]
    assert law.cv(np.ones(3), batches) == pytest.approx(cvs, rel=5e-3)
    assert law.pooled.mean == pytest.approx(np.concatenate([SMALL, MIDDLE, LARGE]).mean(), rel=1e-12)
    assert group_of(law, 20.0).steps == pytest.approx(900)


def test_each_batch_has_the_points_of_its_group() -> None:
    law = law_of(SMALL, MIDDLE, LARGE)
    for batch, sample in ((1, SMALL), (4, SMALL), (6, MIDDLE), (40, LARGE), (64, LARGE)):
        values = group_of(law, batch).values
        # A point is the mean of two in four hundred or more.
        assert sample.min() * (1 - 1e-12) <= values[0] <= np.quantile(sample, 0.02)
        assert values.max() == pytest.approx(sample.max())
        assert np.all(np.diff(values) >= 0)


def test_groups_that_no_batch_reaches_are_left_out() -> None:
    law = law_of(SMALL, MIDDLE, LARGE).up_to(32)
    assert law.pooled.steps == pytest.approx(1600)
    assert law.pooled.weights.sum() == pytest.approx(1)
    assert law.mean_ms(np.ones(1), np.array([1.0, 32.0, 64.0])) == pytest.approx(
        [SMALL.mean(), MIDDLE.mean(), MIDDLE.mean()]
    )
    assert law_of(SMALL, MIDDLE, LARGE).up_to(math.inf).pooled.steps == 2000
    assert law_of(SMALL, MIDDLE, LARGE).up_to(2).pooled.mean == pytest.approx(SMALL.mean())


@pytest.mark.parametrize("buckets", [[1, 2, 4, 8], [16, 64], [64], [3, 5, 48], [1, 40]])
def test_a_padded_batch_scatters_as_the_bucket_it_is_padded_to(buckets: list[int]) -> None:
    law = law_of(SMALL, MIDDLE, LARGE)
    for batch in range(1, buckets[-1] + 1):
        bucket = buckets[bisect.bisect_left(buckets, batch)]
        assert group_of(law.padded(buckets), batch).mean == group_of(law, bucket).mean


def test_the_tail_is_seen_where_every_group_shows_it() -> None:
    assert law_of(SMALL, MIDDLE, LARGE).sees(0.9975)
    assert not law_of(SMALL, MIDDLE, LARGE).sees(0.998)


def test_rare_events_of_each_group_are_drawn_as_their_counts_leave_them_open() -> None:
    """None, three and none in 1,000: exact (Clopper-Pearson) upper limits of 97.5 % for three in 1,000 are 0.874 %, and
    for one seen in a thousand 0.556 %, which is what one more step at the longest one adds to none."""
    calm, stalled = np.linspace(0.9, 1.1, 1000), np.repeat([1.0, 50.0], [997, 3])
    law, rng = law_of(calm, stalled, calm), np.random.default_rng(0)
    laws = [law.drawn(rng) for _ in range(4000)]
    rates = np.array([group_of(each, 10.0).weights[group_of(each, 10.0).values > 10].sum() for each in laws])
    assert np.quantile(rates, 0.975) == pytest.approx(0.00874, rel=0.05)
    longest = np.array([[group_of(each, batch).weights[-1] for batch in (1.0, 64.0)] for each in laws])
    assert np.quantile(longest, 0.975, axis=0) == pytest.approx([0.00556, 0.00556], rel=0.07)
    assert np.mean([each.mean_ms(np.ones(1), np.array([1.0]))[0] for each in laws]) == pytest.approx(1, abs=1e-3)


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


def test_one_group_is_written_as_ever() -> None:
    law = noise_of(SMALL, np.ones(len(SMALL)))
    assert "by_batch" not in law.to_json()


@pytest.mark.parametrize(
    "broken",
    [
        {"low": [1.0]},
        {"low": [5.0, 1.0], "high": [8.0, 4.0]},
        {"group": [0, 0]},
        {"group": [0, 2]},
        {"group": [0]},
        {"low": [math.nan, 5.0]},
        {"low": [], "high": []},
    ],
)
def test_what_are_no_groups_is_refused(broken: dict[str, list[float]]) -> None:
    whole = {"values": [1.0, 2.0], "weights": [0.5, 0.5], "steps": 2.0, "independent": 2.0}
    groups = {"low": [1.0, 5.0], "high": [4.0, 8.0], "group": [0, 1]}
    assert noise_from_json({**whole, "by_batch": groups}) is not None
    with pytest.raises(ValueError, match="groups of ratios"):
        noise_from_json({**whole, "by_batch": {**groups, **broken}})
