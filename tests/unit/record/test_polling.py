"""Windows from readings of a server, with times as planted; and the whole command against a real HTTP server."""

import json
from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import latfit
from latfit.api import record_server
from latfit.errors import BadInput, TargetNotWritable, WrongUsage
from latfit.metrics.server import Reading, Unanswered
from latfit.metrics.state import state_of
from latfit.record.polling import MetricsRecorder
from latfit.trace.parquet import read_parquet
from latfit.validation.server import read_server
from tests.stand_in import Steps, in_a_row, one_after_another, serving, steady


def reading(steps: Steps, t_s: float, at_s: float | None = None) -> Reading:
    text = steps.text(t_s).encode()
    return Reading(t_s if at_s is None else at_s, 0.001, text, state_of(BytesIO(text), "it"))


def test_windows_hold_the_steps_between_readings(tmp_path: Path) -> None:
    """Loads that change every 4 s: 4, 8 and 12 requests, 10 + B ms a step."""
    parts = [steady(4.0, B, (10 + B) / 1e3, waiting=B // 12) for B in (4, 8, 12)]
    steps = in_a_row(parts, 4.0)
    recorder = MetricsRecorder(tmp_path / "t.parquet", {"path": "gpu"}, {"max_num_seqs": 16})
    for t in np.arange(0.02, 12.0, 1.0):
        recorder.take(reading(steps, t))
    recorder.write()
    trace = read_parquet(tmp_path / "t.parquet")
    assert set(trace["path"].tolist()) == {"gpu"}
    busy = ~trace["idle"].astype(bool)
    B, T = trace.floats("B")[busy], trace.floats("T_ms")[busy]
    pure = np.abs(B - np.rint(B)) < 0.2  # not across a change of load
    assert pure.sum() >= 7
    assert T[pure] == pytest.approx(10 + np.rint(B[pure]), rel=0.03)  # one step more or less in each
    assert trace.floats("window_steps").sum() == (steps.end <= 11.02).sum() - (steps.end <= 0.02).sum()
    assert trace.provenance["kv_capacity_tokens"] == 16_000
    assert trace.provenance["max_num_seqs"] == 16
    assert trace.provenance["largest_step_requests"] in (12, 13)
    assert trace.provenance["largest_step_tokens"] == 128  # the edge above 12 requests and a prompt of 100
    fitted = latfit.fit(tmp_path / "t.parquet", model="linear")
    assert fitted.result.warnings[0].code == "window_means"


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    """A gap in the answers ends a window; counters that fell begin a new run, with texts of its own."""
    steps = steady(60.0, 4, 0.02)
    recorder = MetricsRecorder(tmp_path / "t.parquet")
    for t in (1.0, 2.0, 3.0):
        recorder.take(reading(steps, t))
    recorder.take(Unanswered("cannot be reached"))
    recorder.take(Unanswered("cannot be reached"))
    for at_s, t in ((10.0, 7.0), (11.0, 8.0)):
        recorder.take(reading(steps, t, at_s))
    for at_s, t in ((20.0, 0.5), (21.0, 1.5), (22.0, 2.5)):  # started again
        recorder.take(reading(steps, t, at_s))
    recorder.write()
    trace = recorder.trace()
    assert trace.floats("t_s").tolist() == [0.0, 1.0, 9.0, 19.0, 20.0]
    assert trace["run"].tolist() == ["0", "0", "0", "1", "1"]
    assert trace.floats("T_ms") == pytest.approx(np.full(5, 20.0))
    assert (recorder.polls, recorder.failed, recorder.restarts) == (10, 2, 1)
    before, after = (tmp_path / f"t.metrics-{name}.txt" for name in ("before", "after"))
    assert before.read_text() == steps.text(0.5)
    assert read_server(after, before).requests == 4 * 125 // 19 - 4 * 25 // 19


def test_a_disk_that_is_full_for_a_while_ends_no_recording(tmp_path: Path) -> None:
    """The trace is written once a minute: at first there is no folder for it."""
    steps, folder = steady(200.0, 4, 0.02), tmp_path / "later"
    recorder = MetricsRecorder(folder / "t.parquet")
    for t in (1.0, 30.0, 61.0):
        recorder.take(reading(steps, t))
    folder.mkdir()
    for t in (90.0, 121.0):
        recorder.take(reading(steps, t))
    assert len(read_parquet(folder / "t.parquet")) == 4


def test_windows_with_preempted_requests_are_left_out(tmp_path: Path) -> None:
    steps = steady(10.0, 4, 0.02)
    steps.preemptions = (np.arange(len(steps.end)) == 120) * 1.0
    recorder = MetricsRecorder(tmp_path / "t.parquet")
    for t in (1.0, 2.0, 3.0, 4.0):
        recorder.take(reading(steps, t))
    assert recorder.trace().floats("t_s").tolist() == [0.0, 2.0]
    assert recorder.preempted == 1


@pytest.mark.parametrize(
    "name", ["trtllm_num_requests_running 3", "llamacpp:n_decode_total 3", "sglang:token_usage 0.1"]
)
def test_engines_that_tell_no_steps_are_refused(tmp_path: Path, name: str) -> None:
    told = Reading(0.0, 0.0, b"", state_of([name.encode()], "it"))
    with pytest.raises(BadInput, match="so windows have no mean step"):
        MetricsRecorder(tmp_path / "t.parquet").take(told)


def ended_after(readings: int) -> Callable[[float, float, object], None]:
    """Ctrl-C at a reading."""
    told = count(1)

    def progress(at_s: float, whole_s: float, since: object) -> None:
        if next(told) == readings:
            raise KeyboardInterrupt

    return progress


def test_the_whole_over_http(tmp_path: Path) -> None:
    """What is written between the first and the last reading is what the engine did between them, the user ending it
    with what there is."""
    steps = steady(10.0, 6, 0.02)
    texts = [steps.text(1.0 + 0.5 * i) for i in range(6)]
    out = tmp_path / "t.parquet"
    with serving(one_after_another([*texts[:3], "", *texts[3:]])) as url:
        found = record_server(url, duration="10min", every="100ms", out=out, path="cpu", progress=ended_after(7))
    assert found.counts == {"windows": 4, "preempted_windows": 0, "polls": 7, "unanswered": 1, "restarts": 0}
    assert found.trace.floats("window_steps").tolist() == [25, 25, 25, 25]
    assert found.trace.floats("S").mean() == pytest.approx(6 + 10.0, rel=0.2)
    assert {each.code for each in found.messages} >= {"incomplete"}
    assert json.loads(json.dumps(found.to_json()))["metrics_after"].endswith("t.metrics-after.txt")
    assert found.fit_file == tmp_path / "t.fit.json"
    assert len(found.trace) == 4
    assert found.interrupted
    assert len(read_parquet(out)) == 4


def test_what_cannot_be_recorded_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(TargetNotWritable):
        record_server("localhost:1", out=tmp_path / "none" / "t.parquet")
    with pytest.raises(WrongUsage, match="every"):
        record_server("localhost:1", every="1ms", out=tmp_path / "t.parquet")
    with (
        serving(one_after_another([steady(1.0, 4, 0.02).text(5.0)])) as url,
        pytest.raises(BadInput, match="the engine made no step"),
    ):
        record_server(url, duration="200ms", every="100ms", out=tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []
