"""Feasible ranges."""

import numpy as np
import pytest

from latfit.queueing.capacity import feasible_ranges


def test_ranges_end_where_the_condition_changes() -> None:
    """(x - 1)(x - 2)(x - 3) <= 0 up to 1 and from 2 to 3."""
    ranges = feasible_ranges(np.linspace(0.1, 4, 30), lambda x: (x - 1) * (x - 2) * (x - 3) <= 0, precision=1e-6)
    assert np.ravel(ranges) == pytest.approx([0.1, 1, 2, 3], rel=1e-5)
    assert feasible_ranges(np.linspace(0, 1, 5), lambda _: False) == []
