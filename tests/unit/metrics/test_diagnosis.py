"""What binds planted engines, and what moving a limit of them does; the counters alone decide."""

from io import BytesIO

import numpy as np
import pytest

from latfit.metrics.diagnosis import Binding, Diagnosis, diagnose
from latfit.metrics.server import Reading
from latfit.metrics.state import state_of
from tests.stand_in import Steps, in_a_row, steady


def _readings(steps: Steps) -> list[Reading]:
    readings = []
    for t in np.arange(10.0, 20.5, 1.0):
        text = steps.text(t).encode()
        readings.append(Reading(float(t), 0.001, text, state_of(BytesIO(text), "it")))
    return readings


def of(steps: Steps, limits: dict[str, int] | None = None) -> Diagnosis:
    return diagnose(_readings(steps), limits)


def effect(found: Diagnosis, setting: str) -> str:
    return next(each.effect for each in found.levers if each.setting == setting)


FREE = steady(30.0, 5, 0.015)
AT_LIMIT = steady(30.0, 8, 0.02, waiting=12)
FULL = steady(30.0, 20, 0.03, waiting=4, kv_usage=0.98)


@pytest.mark.parametrize(
    ("steps", "limits", "binding"),
    [
        (FREE, {}, "steps"),
        (AT_LIMIT, {}, "sequences"),
        (AT_LIMIT, {"max_num_seqs": 8}, "sequences"),
        (AT_LIMIT, {"max_num_seqs": 64}, "unknown"),
        (AT_LIMIT, {"max_num_seqs": 64, "max_num_batched_tokens": 20}, "token_budget"),
        (FULL, {}, "kv_cache"),
        (FULL, {"max_num_seqs": 20}, "kv_cache"),
        (steady(1.0, 5, 0.02), {}, "idle"),
    ],
)
def test_what_binds(steps: Steps, limits: dict[str, int], binding: Binding) -> None:
    assert of(steps, limits).binding == binding


def test_what_would_do_nothing_where_nobody_waits() -> None:
    found = of(FREE, {"max_num_batched_tokens": 2048})
    assert [effect(found, name) for name in ("max_num_seqs", "KV cache", "max_num_batched_tokens")] == ["nothing"] * 3
    assert "no step has more than 128 of 2,048 tokens" in found.levers[2].why


def test_more_sequences_help_where_the_sequence_limit_binds() -> None:
    found = of(AT_LIMIT)
    assert effect(found, "max_num_seqs") == "helps"
    assert effect(found, "KV cache") == "nothing"
    assert "stays at its maximum" in found.why


def test_a_place_that_is_free_until_the_next_step_is_no_sign_of_another_limit() -> None:
    """A real server at its limit of 4 shows 3 in every third reading, 3.9 in the mean step."""
    steps = steady(30.0, 4, 0.02, waiting=12)
    steps.decoding = 4.0 - steps.prompts - (np.arange(len(steps.end)) % 150 == 149)
    found = of(steps, {"max_num_seqs": 4})
    assert {each.state.running for each in _readings(steps)} == {3.0, 4.0}
    assert found.binding == "sequences"


def test_a_mean_step_of_the_most_that_ran_is_a_limit_too() -> None:
    """Readings of 6 to 8, and 8 in nearly every step, as a real server showed that does not tell its limit."""
    steps = steady(30.0, 8, 0.02, waiting=12)
    steps.decoding = 8.0 - steps.prompts - 2 * (np.arange(len(steps.end)) % 100 == 99)
    assert {each.state.running for each in _readings(steps)} == {6.0, 8.0}
    assert of(steps).binding == "sequences"
    assert of(steps).figures["running_most"] == 8.0


def test_a_reading_while_idle_hides_no_known_limit() -> None:
    """Requests came only after the first readings, at which nothing ran."""
    found = of(in_a_row([steady(0.1, 4, 0.02), steady(20.0, 4, 0.02, waiting=8)], 12.0), {"max_num_seqs": 4})
    assert found.binding == "sequences"
    assert not any("--max-num-seqs" in each.why for each in found.levers)


def test_no_known_limit_is_asked_for() -> None:
    found = of(AT_LIMIT, {"max_num_seqs": 64})
    assert effect(found, "max_num_seqs") == "unknown"
    assert not any("--max-num-seqs" in each.why for each in found.levers)


def test_more_sequences_do_nothing_where_the_cache_is_full() -> None:
    found = of(FULL)
    assert effect(found, "max_num_seqs") == "nothing"
    assert effect(found, "KV cache") == "helps"


def test_preempted_requests_tell_of_the_cache_though_nobody_waits() -> None:
    steps = steady(30.0, 20, 0.03, kv_usage=0.8)
    steps.preemptions = (np.arange(len(steps.end)) % 200 == 0) * 1.0
    found = of(steps)
    assert found.binding == "kv_cache"
    assert found.figures["preemptions"] == 2


def test_a_number_of_running_requests_that_moves_proves_no_limit() -> None:
    steps = steady(30.0, 8, 0.02, waiting=12)
    steps.decoding = 8.0 + np.rint(4 * np.sin(np.arange(len(steps.end)) / 40))
    found = of(steps)
    assert found.binding == "unknown"
    assert "do not prove" in found.why


def test_a_queue_that_grows_asks_for_replicas() -> None:
    steps = steady(30.0, 8, 0.02)
    steps.waiting = np.rint(3.0 * steps.end)  # 3 more a second than are served
    found = of(steps)
    assert found.growing == pytest.approx(3.0)
    assert effect(found, "replicas") == "helps"
    assert found.figures["arrived_per_s"] - found.figures["finished_per_s"] == pytest.approx(3.0, abs=0.2)


def test_figures_are_those_of_the_planted_engine() -> None:
    told = of(AT_LIMIT).figures
    assert (told["T_ms"], told["waiting"], told["prompt_tokens"]) == pytest.approx((20.0, 12.0, 100.0))
    assert told["generated_per_s"] == pytest.approx(8.1 / 0.02, rel=0.01)
    assert of(AT_LIMIT).to_json()["binding"] == "sequences"


def test_a_few_that_wait_at_the_last_moment_are_no_queue_that_grows() -> None:
    steps = steady(30.0, 8, 0.02)
    steps.waiting = np.where(steps.end > 19.5, 8.0, 0.0)
    found = of(steps)
    assert found.binding == "steps"
    assert found.growing == 0
    assert all(each.setting != "replicas" for each in found.levers)
