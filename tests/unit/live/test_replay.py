"""What a replay says of a run: statistics against arithmetic, the verdict of planted runs, and real processes."""

import asyncio
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from latfit.api.running.fronts import Replay, replay
from latfit.cli.app import run
from latfit.errors import LatfitError
from latfit.live import Compared, ThreadExecutor
from latfit.live.replay import MAX_OTHERS, draw_speeds, drive
from latfit.policies import Limits
from latfit.policies.policy import gpu_only
from latfit.simulation import System, linear_path


def planted(measured: float, predicted: float, spread: float, others: float = 0.0) -> Compared:
    beside = {"share": {"gpu": 1.0}, "utilisation": {"gpu": 0.7}, "batch_size": {"p50": 3.0}}
    numbers = {"latency_ms": dict.fromkeys(("mean", "p50", "p99"), measured), **beside}
    ranges = dict.fromkeys(("mean", "p50", "p99"), (predicted - spread, predicted + spread))
    said = {"latency_ms": dict.fromkeys(("mean", "p50", "p99"), predicted), **beside, "range_ms": ranges}
    return Compared("gpu-only", 0.5, 100.0, 1000, numbers, said, others, 0.1, 0)


def test_a_prediction_holds_near_or_within_its_range() -> None:
    assert planted(100.0, 109.0, 1.0).agrees
    assert not planted(100.0, 111.0, 1.0).agrees
    assert planted(100.0, 130.0, 31.0).agrees
    assert planted(100.0, 100.0, 1.0, others=MAX_OTHERS + 0.01).agrees is None
    assert not replace(planted(100.0, 100.0, 1.0), failed=1).agrees


def test_the_verdict_counts_runs_and_leaves_disturbed_ones_out() -> None:
    good, bad, disturbed = planted(1.0, 1.0, 0.1), planted(1.0, 2.0, 0.1), planted(1.0, 1.0, 0.1, others=0.5)
    system = System(linear_path("gpu", 1.0, 1.0, 4))
    assert Replay([good, good], system).verdict == "2 of 2 runs went as predicted."
    assert Replay([good, bad], system).agrees is False
    assert Replay([good, disturbed], system).agrees is None
    assert "others used up to 50 % of the cores" in Replay([disturbed], system).verdict
    several = Replay([good, bad, disturbed], system)
    json.dumps(several.to_json())
    lines = several.summary().splitlines()
    assert [line.rpartition("  ")[2] for line in lines[-3:]] == ["as predicted", "differs", "disturbed"]
    assert several._repr_html_().count("<tr>") == 4
    assert list(several.frame["agrees"]) == [True, False, None]
    (details,) = several.tables()
    at = list(details.columns).index("used by others")
    assert [row[at] for row in details.rows] == ["0 %", "0 %", "50 %"]


def test_every_request_of_a_drive_is_counted() -> None:
    system = System(linear_path("cpu", 0.5, 0.1, 8))
    arrive = np.cumsum(np.full(300, 0.5))
    driven, _ = asyncio.run(drive([ThreadExecutor("cpu", list, 8)], system, gpu_only(Limits(8)), arrive))
    assert driven.result.requests == 300
    assert driven.failed == 0
    assert driven.result.summaries[0].counted == 300


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_on_two_cores(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes; whether others disturb it is no matter of the test, and nothing is repeated."""
    monkeypatch.setattr("latfit.live.replay.MAX_OTHERS", math.inf)
    monkeypatch.setattr("latfit.live.bench.TRIES", 1)
    monkeypatch.setattr("latfit.live.bench.MIN_PROBE_S", 0.2)
    typed = "replay --policy three-stage --load 30% --duration 1s --json"
    exit_code = run(typed.split(" "))
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert exit_code == (0 if found["agrees"] else 4)
    assert found["failed"] == 0
    assert found["measured"].keys() == found["predicted"].keys() - {"range_ms"}
    assert set(found["measured"]["share"]) == {"gpu", "cpu"}
    assert found["measured"]["latency_ms"]["mean"] > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "fastest"}, "policy 'fastest' is not known"),
        ({"load": "70%", "rate": "10/s"}, "load, rate: these contradict each other"),
        ({"load": "120%"}, "above 0 % and below 100 %"),
        ({"max_batch": 0}, "batches of up to 0"),
        ({"launch": "-1ms"}, "-1"),
        ({"model": "none"}, "none"),
        ({"policy": []}, "no policy or no load"),
        ({"load": []}, "no policy or no load"),
        ({"executors": []}, "0 executors for gpu-only, three-stage"),
        ({"executors": [ThreadExecutor("gpu", list, 4)]}, "1 executors for gpu-only, three-stage"),
    ],
)
def test_what_cannot_be_replayed_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(LatfitError, match=says):
        replay(**given)  # type: ignore[arg-type]


def test_a_promise_below_what_was_surely_measured_is_broken() -> None:
    run = replace(planted(100.0, 100.0, 1.0), lowest_p99_ms=95.0)
    assert run.promise_kept is None
    assert replace(run, promised_p99_ms=96.0).agrees
    broken = replace(run, promised_p99_ms=94.0)
    assert not broken.promise_kept
    assert not broken.agrees
    assert "promises a p99 of 94 ms at most; broken (100 ms)" in broken.notes[0]


def test_a_run_lies_among_the_speeds_that_its_probes_allow() -> None:
    """Planted: ln speeds of halves and of the run are normal with 3 and 6 % around a level; of 400 runs, 95 %
    lie between the outermost of 40."""
    rng, sd = np.random.default_rng(0), np.array([0.03, 0.06])
    inside = np.zeros(2)
    for _ in range(400):
        level = rng.normal(0, 0.3, 2)
        drawn = draw_speeds(np.exp(level + sd * rng.standard_normal((4, 2))), 40, rng)
        ran = np.exp(level + sd * rng.standard_normal(2))
        inside += (drawn.min(axis=0) <= ran) & (ran <= drawn.max(axis=0))
    np.testing.assert_allclose(inside / 400, 0.975, atol=4 * math.sqrt(0.975 * 0.025 / 400))
