"""Windows of a planted engine, fitted, simulated and held against its own histograms."""

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from latfit.api import Recorded, fit, fit_recording, validate
from latfit.metrics.server import Reading
from latfit.metrics.state import state_of
from latfit.record.polling import MetricsRecorder
from tests.stand_in import Served, served
from tests.unit.metrics.test_state import TRITON

RATES, EACH_S = (4, 12, 25, 8), 20.0
BEGIN_S, END_S = 2.0, 75.0


def planted(most: int) -> Served:
    """6 + 0.3 B + 0.02 S ms a step; the load changes every 20 s, and with at most 8 requests the third one waits."""
    rng = np.random.default_rng(1)
    arrivals = [EACH_S * i + np.sort(rng.uniform(0, EACH_S, int(rate * EACH_S))) for i, rate in enumerate(RATES)]
    at_s = np.concatenate(arrivals)
    prompt, output = rng.integers(20, 60, len(at_s)), rng.integers(5, 60, len(at_s))
    return served(at_s, prompt, output, lambda B, S: (6 + 0.3 * B + 0.02 * S) / 1e3, most)


@pytest.fixture(scope="module")
def engine() -> Served:
    return planted(most=64)


def recorded(engine: Served, out: Path) -> Recorded:
    return of_texts({t: engine.text(t) for t in np.arange(BEGIN_S, END_S + 0.1, 1.0)}, out)


def of_texts(texts: Mapping[float, str], out: Path) -> Recorded:
    recorder = MetricsRecorder(out, {"path": "gpu"}, {"async_scheduling": False})
    for t, told in texts.items():
        text = told.encode()
        recorder.take(Reading(t, 0.001, text, state_of(BytesIO(text), "it")))
    recorder.write()
    return Recorded(
        recorder.trace(),
        "http://localhost:8000",
        "vLLM",
        out,
        {"unanswered": 0, "polls": 74, "restarts": 0, "preempted_windows": 0},
        0.001,
    )


@pytest.fixture(scope="module")
def found(engine: Served, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return fit_recording(recorded(engine, tmp_path_factory.mktemp("watch") / "t.pq"))


def test_the_simulated_load_has_the_times_that_the_server_counted(found: Recorded) -> None:
    """With the planted model within 4 %; one that is chosen goes beyond the windows, whose quiet ones are not used."""
    line = validate(fit(found.out, model="linear"), found.out, service="deterministic")
    assert [each.error_pct for each in line.result.clocks.values()] == pytest.approx([0, 0, 0], abs=4)
    assert not line.setup.settings.padded_graphs  # the steps were measured as they are served
    assert found.validation is not None
    assert all(abs(each.error_pct) < 12 for each in found.validation.result.clocks.values())
    assert found.validation.verdict in found.lines
    assert json.loads(json.dumps(found.to_json()))["validation"]["verdict"] == found.validation.verdict


def test_a_plan_for_the_load_that_was_seen_is_next(found: Recorded, engine: Served) -> None:
    seen = (engine.last > BEGIN_S) & (engine.last <= END_S)
    lengths = f"--lengths {round(engine.prompt[seen].mean())}:{round(engine.output[seen].mean())}"
    assert found.next[0].startswith(f"latfit plan --fit {found.fit_file} --rate 12")
    assert lengths in found.next[0]
    assert found.summary().startswith(found.verdict)


def test_of_executions_without_tokens_a_plan_of_batches_is_next(tmp_path: Path) -> None:
    steps = np.cumsum(20 + np.arange(40) % 7)
    texts = {
        float(i): TRITON.format(small=7, requests=100 * i, batches=steps[i], compute_us=500_000 * i) for i in range(40)
    }
    found = fit_recording(of_texts(texts, tmp_path / "t.parquet"))
    assert found.fit is not None
    assert found.validation is None
    assert "Triton publishes no histograms" in found.not_validated
    assert found.next == [f"latfit fit {tmp_path / 't.parquet'}", "latfit plan --sla 20ms"]
