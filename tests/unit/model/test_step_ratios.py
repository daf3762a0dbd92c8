"""The law of single steps: its sums against the sample's, its tail point by point, what a sample leaves open."""

import numpy as np
import pytest

from latfit.model.step_ratios import ratios_from_json, ratios_of


@pytest.mark.parametrize("n", [1, 7, 250, 5_000, 300_000])
@pytest.mark.parametrize("shape", [0.1, 1.5])
def test_sums_are_those_of_the_sample(n: int, shape: float) -> None:
    sample = np.random.default_rng(n).lognormal(0, shape, n)
    law = ratios_of(sample, np.ones(n))
    assert law.mean == pytest.approx(sample.mean(), rel=1e-12)
    # What points of next to equal steps lose of the second moment.
    assert law.mean_square == pytest.approx(np.mean(sample**2), rel=2e-3)
    assert law.weights.sum() == pytest.approx(1)
    assert len(law.values) <= 1200


def test_the_tail_is_kept_step_by_step() -> None:
    sample = np.random.default_rng(1).lognormal(0, 1, 10_000)
    law = ratios_of(sample, np.ones(len(sample)))
    assert law.values[-100:].tolist() == pytest.approx(np.sort(sample)[-100:].tolist())
    assert law.weights[-100:].tolist() == pytest.approx([1e-4] * 100)


def test_quantiles_are_the_samples() -> None:
    sample = np.random.default_rng(2).lognormal(0, 0.5, 200_000)
    law = ratios_of(sample, np.ones(len(sample)))
    for q, point in ((0.02, 0.005), (0.5, 0.005), (0.99, 0.005), (0.995, 5e-5), (0.9995, 5e-6)):
        # A point stands for a 200th of its decade of the tail.
        low, high = np.quantile(sample, [q - point, q + point])
        assert low <= law.quantile(q) <= high


def test_weights_stand_for_steps() -> None:
    few = ratios_of(np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    many = ratios_of(np.array([1.0, 1.0, 1.0, 2.0]), np.ones(4))
    assert few.mean == many.mean == 1.25
    assert few.steps == many.steps == 4


def test_a_rare_event_is_drawn_as_its_count_leaves_it_open() -> None:
    """Three events in 1,000: the exact 95 % interval of their rate is 0.0619 % to 0.874 % (Clopper and Pearson)."""
    law = ratios_of(np.repeat([1.0, 50.0], [997, 3]), np.ones(1000))
    rng = np.random.default_rng(0)
    rates = np.array([law.drawn(rng).weights[law.values > 10].sum() for _ in range(4000)])
    assert np.quantile(rates, 0.975) == pytest.approx(0.00874, rel=0.05)
    # The lower end counts one event more than was seen, so it is never too low.
    assert np.quantile(rates, 0.025) > 0.000619


def test_where_the_tail_decides() -> None:
    rng = np.random.default_rng(0)
    calm = ratios_of(rng.lognormal(0, 0.03, 5_000), np.ones(5_000))
    stalled = np.where(np.arange(5_000) % 170 == 0, 50.0, 1.0)
    assert calm.slow_share < 0.02
    assert ratios_of(stalled, np.ones(5_000)).slow_share == pytest.approx(30 * 2500 / (30 * 2500 + 4970), rel=0.02)


def test_a_tail_counts_as_seen_from_one_independent_step_beyond_it() -> None:
    steps = np.linspace(0.9, 1.1, 400)
    assert ratios_of(steps, np.ones(400)).sees(0.99)
    assert not ratios_of(steps, np.ones(400)).sees(0.999)
    assert not ratios_of(steps, np.ones(400), independent=60.0).sees(0.99)


def test_json_gives_the_same_law() -> None:
    law = ratios_of(np.random.default_rng(0).lognormal(0, 1, 3_000), np.ones(3_000), 1_500.0)
    again = ratios_from_json(law.to_json())
    assert again is not None
    assert again.values == pytest.approx(law.values, rel=1e-7)
    assert again.weights == pytest.approx(law.weights, rel=1e-7)
    assert again.mean == pytest.approx(law.mean, rel=1e-7)
    assert again.independent == 1_500.0
    assert ratios_from_json(None) is None


@pytest.mark.parametrize(
    "broken",
    [{"values": [2.0, 1.0]}, {"values": [-1.0, 1.0]}, {"weights": [0.5]}, {"weights": [0.5, 0.7]}, {"values": []}],
)
def test_what_is_no_law_is_refused(broken: dict[str, list[float]]) -> None:
    whole = {"values": [1.0, 2.0], "weights": [0.5, 0.5], "steps": 2.0, "independent": 2.0}
    with pytest.raises(ValueError, match="ratios"):
        ratios_from_json({**whole, **broken})
