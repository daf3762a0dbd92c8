"""What a server counted of a run: texts written by hand from planted requests, and what a simulation is held to."""

import gzip
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.api import validate as validated
from latfit.errors import BadInput
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.trace.table import Trace
from latfit.validation.compare import ValidationOptions, validate
from latfit.validation.measured import Measured, during, not_together, starts_of
from latfit.validation.server import read_server
from latfit.workload.requests import make_requests
from tests.conftest import ROOT

MEASURED = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data")) / "vllm_cpu"
LABELS = 'engine="0",model_name="m"'
EDGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def histogram(name: str, seconds: np.ndarray) -> str:
    lines = [f'vllm:{name}_bucket{{{LABELS},le="{edge}"}} {float(np.count_nonzero(seconds <= edge))}' for edge in EDGES]
    lines.append(f'vllm:{name}_bucket{{{LABELS},le="+Inf"}} {float(len(seconds))}')
    lines += [
        f"vllm:{name}_count{{{LABELS}}} {float(len(seconds))}",
        f"vllm:{name}_sum{{{LABELS}}} {float(seconds.sum())!r}",
    ]
    return "\n".join([f"# TYPE vllm:{name} histogram", *lines, f"vllm:{name}_created{{{LABELS}}} 1.7e+09"]) + "\n"


def text(ttft: np.ndarray, tpot: np.ndarray, latency: np.ndarray, front: float | np.ndarray = 0.02) -> str:
    """`/metrics` of a server whose engine's scheduler has each request `front` seconds after it came."""
    parts = {
        "time_to_first_token_seconds": ttft,
        "request_time_per_output_token_seconds": tpot,
        "e2e_request_latency_seconds": latency,
        "request_queue_time_seconds": np.zeros(len(ttft)),
        "request_prefill_time_seconds": ttft - front,
        "request_inference_time_seconds": latency - front,
    }
    cache = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="600",kv_cache_size_tokens="9600",{LABELS}}} 1.0\n'
    more = f"vllm:num_preemptions_total{{{LABELS}}} 3.0\nprocess_cpu_seconds_total 12.0\n"
    return "".join(histogram(name, values) for name, values in parts.items()) + cache + more


TTFT, TPOT, LATENCY = np.array([0.1, 0.2, 0.6]), np.array([0.01, 0.02, 0.03]), np.array([1.0, 2.0, 4.0])


class TestTexts:
    def test_means_and_buckets(self, tmp_path: Path) -> None:
        (tmp_path / "1.txt").write_text(text(TTFT, TPOT, LATENCY))
        found = read_server(tmp_path / "1.txt")
        assert found.requests == 3
        assert found.server_ms() == pytest.approx({"ttft_ms": 300.0, "tpot_ms": 20.0, "latency_ms": 7000 / 3})
        assert found.engine_ms() == pytest.approx({"ttft_ms": 280.0, "tpot_ms": 20.0, "latency_ms": 7000 / 3 - 20})
        assert found.quantile_ms("ttft_ms", 0.5) == (100.0, 250.0)
        assert found.quantile_ms("ttft_ms", 0.99) == (500.0, 1000.0)
        assert found.counts["preemptions"] == 3.0
        assert found.seen.last.facts == {"block_size": 16, "num_gpu_blocks": 600, "kv_capacity_tokens": 9600}

    def test_only_what_came_between_two_texts(self, tmp_path: Path) -> None:
        (tmp_path / "0.txt").write_text(text(TTFT[:1], TPOT[:1], LATENCY[:1]))
        with gzip.open(tmp_path / "1.txt.gz", "wt") as stream:
            stream.write(text(TTFT, TPOT, LATENCY))
        found = read_server(tmp_path / "1.txt.gz", tmp_path / "0.txt")
        assert found.requests == 2
        assert found.server_ms() == pytest.approx({"ttft_ms": 400.0, "tpot_ms": 25.0, "latency_ms": 3000.0})
        assert found.quantile_ms("latency_ms", 0.5) == (1000.0, 2500.0)

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [
            (None, "t_s,prompt_tokens\n0,1\n", "holds no metrics of vLLM, SGLang"),
            (None, "vllm:num_requests_running{} 3\n", "vLLM publishes no histograms of TTFT, TPOT, latency"),
            (None, histogram("time_to_first_token_seconds", TTFT), "vLLM publishes no histograms of TPOT, latency"),
            (None, text(TTFT[:0], TPOT[:0], LATENCY[:0]), "no finished request"),
            (text(TTFT, TPOT, LATENCY), text(TTFT[:1], TPOT[:1], LATENCY[:1]), "below those of the text from before"),
            (text(TTFT, TPOT, LATENCY), text(TTFT, TPOT, LATENCY), "no request finished between"),
            (None, "\x00\xff vllm:{{{ NaN\nvllm:x_count nan\n", "holds no metrics of vLLM"),
        ],
    )
    def test_what_is_wrong_is_told(self, tmp_path: Path, before: str | None, after: str, said: str) -> None:
        (tmp_path / "1.txt").write_text(after)
        if before is not None:
            (tmp_path / "0.txt").write_text(before)
        with pytest.raises(BadInput, match=said):
            read_server(tmp_path / "1.txt", None if before is None else tmp_path / "0.txt")


COSTS = linear_costs(8.0, 0.05, 0.02)
LIMITS = EngineSettings(kv_blocks=600, max_num_seqs=64, max_num_batched_tokens=512)


def test_the_simulation_is_held_to_the_engine_and_the_client_told_apart(tmp_path: Path) -> None:
    """The client sees every moment 50 ms late, and each token 2 ms later than the one before; the server 20 ms. The
    engine's own clock leaves out the rest of the step that runs when a request comes, too."""
    rng = np.random.default_rng(3)
    requests = make_requests(np.sort(rng.uniform(0, 15e3, 90)), rng.integers(20, 400, 90), rng.integers(2, 90, 90))
    run = serve(requests, COSTS, LIMITS)
    rest = run.seen_ms - requests.arrival_ms
    late = 50.0 + 2.0 * (requests.output_tokens - 1)
    measured = Measured(requests, run.first_ms + 50.0, run.last_ms + late)
    (tmp_path / "1.txt").write_text(
        text((run.ttft_ms + 20) / 1e3, run.tpot_ms / 1e3, (run.latency_ms + 20) / 1e3, (20 + rest) / 1e3)
    )
    found = validate(measured, COSTS, LIMITS, ValidationOptions(server=read_server(tmp_path / "1.txt")))
    assert found.agrees
    assert not validate(measured, COSTS, LIMITS).agrees
    ttft, tpot, latency = found.clocks.values()
    assert [ttft.error_pct, tpot.error_pct, latency.error_pct] == pytest.approx([0, 0, 0], abs=1e-9)
    assert ttft.client - ttft.server == pytest.approx(30.0)
    assert tpot.client - tpot.server == pytest.approx(2.0)
    assert found.verdict == "Simulation agrees with the server's engine: means within 2 % (90 requests)."
    assert rest.mean() > 1.0
    assert ttft.server - ttft.engine == pytest.approx(20.0 + rest.mean())
    p99 = ttft.quantiles["p99"]
    assert p99.above <= p99.simulated + 20.0 <= p99.up_to
    assert found.to_json()["server"]["metrics"]["ttft_ms"]["engine"] == pytest.approx(
        (run.first_ms - run.seen_ms).mean()
    )


class TestSameStart:
    """A recorder that started at noon, with steps from 12:10 to 12:20."""

    NOON = datetime(2026, 3, 14, 12, tzinfo=UTC).timestamp()
    SAID: Mapping[str, Any] = {"run": "a", "run_started": "2026-03-14T12:00:00.000+00:00"}
    STEPS = Trace({"t_s": np.linspace(600.0, 1200.0, 7), "run": np.full(7, "a")})

    def run(self, began_s: float | None) -> Measured:
        requests = make_requests(np.array([0.0, 60e3]), [10, 10], [2, 2])
        return Measured(requests, np.array([1e2, 61e3]), np.array([2e2, 62e3]), began_s=began_s)

    @pytest.mark.parametrize(
        ("began", "server", "said"),
        [
            (None, None, None),
            (0.0, 2.0, None),
            (0.0, 1800.0, "of the engine that was started"),
            (1000.0, None, None),
            (7000.0, None, "away from the steps"),
            (0.0, None, "away from the steps"),
            (1e30, None, "away from the steps"),
            (0.0, 1e30, "of the engine that was started"),
        ],
    )
    def test_a_run_of_another_start_or_time_is_told(
        self, began: float | None, server: float | None, said: str | None
    ) -> None:
        run = self.run(None if began is None else self.NOON + began)
        found = not_together(starts_of(self.SAID, self.STEPS), run, None if server is None else self.NOON + server)
        assert (said is None) == (found is None)
        assert found is None or str(said) in found.message
        assert not_together([], run, self.NOON) is None

    @pytest.mark.parametrize(
        ("began", "said"), [(700.0, None), (700.0 + 5 * 3600, None), (1255.0, None), (1300.0, "2 min"), (30.0, "8 min")]
    )
    def test_a_run_of_another_time_than_a_log_is_told(self, began: float, said: str | None) -> None:
        """The log names no year and no zone. It has steps from 12:10 to 12:20, the run takes a minute."""
        day_s = datetime(2026, 3, 14, tzinfo=UTC).timestamp() - datetime(2026, 1, 1, tzinfo=UTC).timestamp()
        log = {"format": "vllm", "log_clock_s": [day_s + 12.0 * 3600 + 600, day_s + 12 * 3600 + 1200]}
        found = not_together(starts_of(log), self.run(self.NOON + began), None)
        assert (said is None) == (found is None)
        assert found is None or f", {said} away from the steps" in found.message

    def test_steps_of_a_run_are_those_of_its_time(self) -> None:
        trace = Trace(self.STEPS.columns, self.SAID)
        assert during(trace, self.run(self.NOON + 790)).tolist() == [False, False, True, False, False, False, False]
        assert during(trace, self.run(None)).all()
        assert during(self.STEPS, self.run(self.NOON + 790)).all()

    def test_rows_of_a_log_are_those_of_these_minutes_of_an_hour(self) -> None:
        """It has steps from 12:10 to 12:20 in some zone; the run takes a minute, two hours later by its clock."""
        log = {"format": "vllm", "runs": 1, "log_clock_s": [12 * 3600 + 600.0, 12 * 3600 + 1200.0]}
        steps = Trace({"t_s": np.linspace(0.0, 600.0, 7), "run": np.full(7, "1")}, log)
        at = during(steps, self.run(self.NOON + 790 + 7200))
        assert at.tolist() == [False, False, True, False, False, False, False]
        two = Trace(steps.columns, {**log, "runs": 2})  # the second counts from its own start, which nothing tells
        assert during(two, self.run(self.NOON + 790)).all()


def test_a_mean_that_the_simulation_lacks_does_not_agree(tmp_path: Path) -> None:
    """The server counted times per token of others' requests; those of the run have one token each."""
    requests = make_requests([100.0 * i for i in range(40)], np.full(40, 50), np.ones(40, dtype=int))
    run = serve(requests, COSTS, LIMITS)
    seen = run.ttft_ms / 1e3
    (tmp_path / "1.txt").write_text(text(seen, np.full(40, 0.01), seen, (run.seen_ms - requests.arrival_ms) / 1e3))
    server = read_server(tmp_path / "1.txt")
    found = validate(Measured(requests, run.first_ms, run.last_ms), COSTS, LIMITS, ValidationOptions(server=server))
    assert [each.holds for each in found.clocks.values()] == [True, False, True]
    assert not found.agrees


AMX = MEASURED.with_name("vllm_amx")


@pytest.mark.skipif(not AMX.is_dir(), reason="no measured data beside the checkout")
def test_steps_that_the_recorder_has_not_written_yet_are_named() -> None:
    """The first file ends 12 s before the run began; the second one, written minutes later, has its steps."""
    first, second = sorted((AMX / "traces").glob("lim8-trace-*.parquet"))
    texts = {name: AMX / "metrics" / f"lim8_r3.{name}.txt.gz" for name in ("before", "after")}
    given: dict[str, Any] = {"metrics_before": texts["before"], "metrics_after": texts["after"], "max_num_seqs": 8}
    fit, run = AMX / "fits" / "rec_steps.fit.json", AMX / "bench" / "lim8_r3.json.gz"
    with pytest.raises(BadInput, match=r"its last step is .* older than the run") as raised:
        validated(fit, run, run_steps=str(first), **given)
    assert "LATFIT_TRACE_SECONDS" in str(raised.value.remedy)
    other = next((AMX / "traces").glob("rec-trace-*-000000.parquet"))
    with pytest.raises(BadInput) as raised:
        validated(fit, run, run_steps=str(other), **given)
    assert "of the engine that was started at" in str(raised.value.remedy)
    found = validated(fit, run, run_steps=str(second), **given)
    assert found.run_speed is not None
    assert found.run_speed.at_speed.agrees
    assert not found.foreign
