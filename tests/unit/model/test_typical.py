"""The context that a step is taken to have where it names none."""

import numpy as np
import pytest

from latfit.model.features import typical_context, with_typical_context

B = np.array([4.0, 4.0, 2.0])
S = np.array([4.0, 103.0, 2.0])


def test_it_is_the_median_of_a_request() -> None:
    """Decode requests: 4, 3 and 2, with 400, 900 and 100 tokens; the step of weight 5 decides."""
    steps = {"B": B, "S": S, "context_tokens": np.array([400.0, 900.0, 100.0])}
    assert typical_context(steps, np.ones(3)) == {"context_tokens": 100.0}
    assert typical_context(steps, np.array([1.0, 5.0, 1.0])) == {"context_tokens": 300.0}
    assert typical_context(steps, np.array([1.0, 1.0, 5.0])) == {"context_tokens": 50.0}


@pytest.mark.parametrize("context", [None, np.array([1.0, np.nan, 1.0])])
def test_steps_that_do_not_say_have_none(context: np.ndarray | None) -> None:
    steps = {"B": B, "S": S} if context is None else {"B": B, "S": S, "context_tokens": context}
    assert typical_context(steps, np.ones(3)) == {}


def test_steps_get_as_much_a_request() -> None:
    found = with_typical_context({"B": B, "S": S}, {"context_tokens": 100.0, "prefill_context_tokens": 7.0})
    assert found["context_tokens"].tolist() == [400.0, 307.0, 200.0]
    assert found["prefill_context_tokens"].tolist() == [0.0, 7.0, 0.0]
