"""Signed ranks beside SciPy's exact test, and the level that many groups share."""

import numpy as np
import pytest
from scipy.stats import wilcoxon

from latfit.fitting.signed_ranks import Group, most_by_chance
from latfit.stats import FloatArray


def group(d: FloatArray, stratum: FloatArray | None = None) -> Group:
    return Group(np.arange(len(d)), d, np.zeros(len(d), np.intp) if stratum is None else stratum.astype(np.intp))


def sample(n: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_t(2, n)


@pytest.mark.parametrize("n", [9, 12, 20])
def test_the_ends_are_where_scipy_rejects(n: int) -> None:
    """What lies just outside the interval has a p below the level, what lies just inside one above it."""
    d, level = sample(n), 0.05
    low, high = group(d).ends(most_by_chance([group(d)], level)[0])
    assert low is not None
    assert high is not None
    near = 1e-6
    p = [wilcoxon(d - at, alternative="greater", method="exact").pvalue for at in (low - near, low + near)]
    assert p[0] < 1.1 * level < 1.3 * p[1]  # the level is drawn, within a tenth
    p = [wilcoxon(d - at, alternative="less", method="exact").pvalue for at in (high + near, high - near)]
    assert p[0] < 1.1 * level < 1.3 * p[1]


def test_the_estimate_is_the_median_of_walsh_averages() -> None:
    d = sample(11)
    averages = [(d[i] + d[j]) / 2 for i in range(11) for j in range(i, 11)]
    assert group(d).estimate == pytest.approx(np.median(averages))


def test_a_noisy_stratum_counts_by_its_cells_and_not_by_its_scatter() -> None:
    quiet, loud = 1 + 0.01 * sample(20, 1), 100 * sample(6, 2)
    found = group(np.concatenate([quiet, loud]), np.repeat([0.0, 1.0], [20, 6]))
    low, high = found.ends(most_by_chance([found], 0.05)[0])
    assert low is not None
    assert high is not None
    assert 0.95 < low < 1 < high < 1.05


def test_groups_that_are_one_share_no_level() -> None:
    d = sample(16)
    one, other = group(d), Group(np.arange(16, 32), sample(16, 1), np.zeros(16, np.intp))
    (alone,) = most_by_chance([one], 0.05)
    assert most_by_chance([one, one, one], 0.05) == pytest.approx([alone] * 3)
    assert min(most_by_chance([one, other], 0.05)) > alone


def test_levels_beyond_the_draws_are_those_of_the_normal_distribution() -> None:
    """Of 40 cells, whose sum is nearly normal: twice the level that draws can just tell, and half of it."""
    d = sample(40)
    drawn, normal = (most_by_chance([group(d)], level)[0] for level in (0.006, 0.0045))
    assert normal > drawn
    assert normal == pytest.approx(drawn, rel=0.08)


def test_too_few_cells_have_no_ends() -> None:
    few = group(sample(3))
    assert few.ends(most_by_chance([few], 0.05)[0]) == (None, None)


def test_joint_coverage_of_overlapping_groups() -> None:
    """200 draws of cells of very unlike scatter: the upper or the lower ends of three groups fail in 5 % of them at
    most, so that more than 20 of 200 come up once in 1,000 tests."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 1.5, 24))
    parts = [np.arange(24), np.arange(12), np.arange(12, 24)]
    failed = 0
    for _ in range(200):
        d = scale * rng.standard_t(2, 24)
        groups = [Group(cells, d[cells], np.zeros(len(cells), np.intp)) for cells in parts]
        ends = [each.ends(far) for each, far in zip(groups, most_by_chance(groups, 0.05), strict=True)]
        failed += any(low is not None and low > 0 for low, _ in ends)
    assert failed <= 20
