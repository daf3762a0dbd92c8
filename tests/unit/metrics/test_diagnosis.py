"""What binds planted engines, and what moving a limit of them does; the counters alone decide."""

import re
from io import BytesIO

import numpy as np
import pytest

from latfit.metrics.diagnosis import Binding, Diagnosis, diagnose
from latfit.metrics.server import Reading
from latfit.metrics.state import state_of
from tests.stand_in import Steps, steady


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


def test_a_long_queue_in_few_readings_is_no_freedom_from_limits() -> None:
    """Requests wait in 4 of 11 readings, but nearly four times as many as run."""
    steps = steady(30.0, 8, 0.02)
    steps.waiting[steps.end > 16.5] = 80
    assert of(steps, {"max_num_seqs": 8}).binding == "sequences"
    assert of(steps).binding == "sequences"


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 256}])
def test_light_traffic_between_readings_is_no_limit(limits: dict[str, int]) -> None:
    """Steps run, but every reading has nothing running and nothing waiting."""
    steps = steady(30.0, 5, 0.015)
    runs = (steps.end % 1.0 > 0.3) & (steps.end % 1.0 < 0.5)
    names = ("end", "seconds", "decoding", "prompts", "prompt_tokens", "waiting", "kv_usage")
    assert of(Steps(**{name: getattr(steps, name)[runs] for name in names}), limits).binding == "steps"


@pytest.mark.parametrize(("seconds", "binding"), [(2.5, "sequences"), (8.5, "kv_cache")])
def test_a_cache_that_is_full_for_a_moment_is_no_limit(seconds: float, binding: Binding) -> None:
    steps = steady(30.0, 8, 0.02, waiting=12)
    steps.kv_usage[(steps.end > 10.5) & (steps.end < 10.5 + seconds)] = 0.95
    found = of(steps)
    assert found.binding == binding
    assert effect(found, "KV cache") == ("helps" if binding == "kv_cache" else "unknown")


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 8}])
def test_two_engines_at_their_limit_are_found_by_their_steps(limits: dict[str, int]) -> None:
    """Both run eight at once in every step; the gauges miss two of each, which have just ended."""
    readings = []
    for t in np.arange(10.0, 20.5, 1.0):
        one = re.sub(r"(num_requests_running\{[^}]*\}) \d+", r"\1 6", AT_LIMIT.text(t))
        text = (one + one.replace('engine="0"', 'engine="1"')).encode()
        readings.append(Reading(float(t), 0.001, text, state_of(BytesIO(text), "it")))
    assert readings[0].state.running == 12
    assert diagnose(readings, limits).binding == "sequences"


def test_more_sequences_help_where_the_sequence_limit_binds() -> None:
    found = of(AT_LIMIT)
    assert effect(found, "max_num_seqs") == "helps"
    assert effect(found, "KV cache") == "nothing"
    assert "stays at its maximum" in found.why


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
