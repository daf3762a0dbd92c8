"""Reading measured runs: the shapes that are known, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.validation.measured import Measured, as_measured
from latfit.workload import read_requests


def read_measured(file: Path) -> Measured:
    return as_measured(read_requests(file))


HEAD = "t_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"


def written(folder: Path, text: str) -> Path:
    target = folder / "run.csv"
    target.write_text(text)
    return target


def test_moments_count_from_the_first_arrival(tmp_path: Path) -> None:
    run = read_measured(written(tmp_path, HEAD + "100.0,8,3,100.5,101.0\n100.25,9,1,101.5,101.5\n"))
    np.testing.assert_allclose(run.requests.arrival_ms, [0.0, 250.0])
    np.testing.assert_allclose(run.first_ms, [500.0, 1500.0])
    np.testing.assert_allclose(run.last_ms, [1000.0, 1500.0])


@pytest.mark.parametrize(("unit", "scale"), [("s", 1e-3), ("ms", 1.0)])
def test_spans_count_from_each_arrival(tmp_path: Path, unit: str, scale: float) -> None:
    head = f"arrived_at,num_prefill_tokens,num_decode_tokens,ttft_{unit},latency_{unit}\n"
    run = read_measured(written(tmp_path, head + f"2.0,8,3,{500 * scale},{900 * scale}\n"))
    np.testing.assert_allclose([run.first_ms[0], run.last_ms[0]], [500.0, 900.0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "no request"),
        (HEAD.replace("first_token_s", "began_s") + "0,1,1,1,1\n", "no times of first and last tokens"),
        (HEAD.replace("t_s,", "when,", 1) + "0,1,1,1,1\n", "no columns of request arrivals"),
        (HEAD + "0,1,1,1,1\n5,1,1,4,6\n", "request 2 has a first token before"),
        (HEAD + "0,1,1,2,1\n", "request 1"),
        (HEAD + "0,1,1,1,\n", "request 1"),
        (HEAD + "3,1,1,4,5\n2,1,1,4,5\n", "arriv"),
        (HEAD + "3,0,1,4,5\n", "request 1"),
        (HEAD + "3,4,0,4,5\n", "request 1"),
    ],
)
def test_what_is_no_measured_run_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        read_measured(written(tmp_path, text))
    assert "run.csv" in str(caught.value)


def aiperf(start_ns: int, tokens: tuple[int, int], times: tuple[float, float], **more: Any) -> str:
    values = zip(("input_sequence_length", "output_sequence_length"), tokens, strict=True)
    metrics: dict[str, Any] = {name: {"value": value} for name, value in values}
    spans = zip(("time_to_first_token", "request_latency"), times, strict=True)
    metrics |= {name: {"value": value, "unit": "ms"} for name, value in spans}
    phase = more.pop("phase", "profiling")
    return json.dumps(
        {"metadata": {"request_start_ns": start_ns, "benchmark_phase": phase}, "metrics": metrics, **more}
    )


BENCH = {
    "start_times": [100.0, 100.2, 100.5],
    "input_lens": [9, 7, 8],
    "output_lens": [3, 0, 2],
    "ttfts": [0.2, 0.0, 0.1],
    "itls": [[0.05, 0.15], [], [0.3]],
    "errors": ["", "boom", ""],
}
SENT = 10**18
FILES = {
    "vllm": json.dumps(BENCH),
    "aiperf": "\n".join(
        [
            aiperf(SENT + 500_000_000, (8, 2), (100.0, 400.0)),
            aiperf(SENT, (9, 3), (200.0, 400.0), error=None),
            aiperf(SENT, (9, 3), (1.0, 2.0), error={"code": 500}),
            aiperf(SENT - 5_000_000_000, (9, 3), (1.0, 2.0), phase="warmup"),
        ]
    ),
    "guidellm": json.dumps(
        {
            "metadata": {"guidellm_version": "0.6.0"},
            "benchmarks": [
                {"requests": {"successful": []}},
                {
                    "requests": {
                        "successful": [
                            {
                                "request_start_time": 11.5,
                                "prompt_tokens": 8,
                                "output_tokens": 2,
                                "time_to_first_token_ms": 100.0,
                                "request_latency": 0.4,
                            },
                            {
                                "start_time": 11.0,
                                "prompt_tokens": 9,
                                "output_tokens": 3,
                                "time_to_first_token_ms": 200.0,
                                "request_latency": 0.4,
                            },
                        ]
                    }
                },
            ],
        },
        indent=1,
    ),
}


def genai_perf(sent: int, moments: tuple[int, ...], usage: tuple[int, int] | None, chat: bool = True) -> dict[str, Any]:
    """A request as Perf Analyzer keeps it: the role first, then a token a response, the usage, the end."""
    told = [{"delta": {"content": "x"}} if chat else {"text": "x"} for _ in moments]
    events = [{"choices": [{"delta": {"role": "assistant"}}]}, *({"choices": [each]} for each in told)]
    times = [sent + 1, *moments]
    if usage is not None:
        counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        events, times = [*events, {"choices": [], "usage": counts}], [*times, moments[-1] + 7_000_000]
    outputs = [{"response": f"data: {json.dumps(each)}\n\n"} for each in events]
    return {
        "timestamp": sent,
        "request_inputs": {"payload": "{}"},
        "response_timestamps": [*times, times[-1] + 1],
        "response_outputs": [*outputs, {"response": "data: [DONE]\n\n"}],
    }


MS = 1_000_000
EXPERIMENT = {
    "experiment": {"mode": "request_rate", "value": 2},
    "requests": [
        genai_perf(SENT + 500 * MS, (SENT + 600 * MS, SENT + 900 * MS), (8, 2), chat=False),
        genai_perf(SENT, (SENT + 200 * MS, SENT + 250 * MS, SENT + 400 * MS), (9, 3)),
    ],
    "window_boundaries": [0],
}
FILES["genai-perf"] = json.dumps({"experiments": [EXPERIMENT], "version": "2.5", "service_kind": "openai"})


def inference_perf(start_s: float, lengths: tuple[int, int], times_s: list[float], old: bool) -> dict[str, Any]:
    """A request as inference-perf keeps it, now and before 0.3."""
    info: dict[str, Any] = {"input_tokens": lengths[0]}
    if old:
        info |= {"output_tokens": lengths[1], "output_token_times": times_s}
    else:
        info["request_metrics"] = {"text": {"input_tokens": lengths[0]}}
        info["response_metrics"] = {"output_tokens": lengths[1], "output_token_times": times_s}
    span = {"start_time": start_s, "end_time": times_s[-1] + 0.001}
    return {"scheduled_time": start_s, **span, "request": "{}", "response": "", "info": info, "error": None}


FAILED = {"start_time": 1.0, "end_time": 2.0, "info": {"input_tokens": 3}, "error": {"error_type": "TimeoutError"}}
for name, is_old in (("inference-perf", False), ("inference-perf before", True)):
    FILES[name] = json.dumps(
        [
            inference_perf(1393.75, (8, 2), [1393.85, 1394.15], is_old),
            FAILED,
            inference_perf(1393.25, (9, 3), [1393.45, 1393.5, 1393.65], is_old),
        ],
        indent=1,
    )


@pytest.mark.parametrize("kind", FILES)
def test_what_load_generators_write(tmp_path: Path, kind: str) -> None:
    """One run told three ways: 9 + 3 tokens sent at 0, 8 + 2 at 500 ms, the order of completion the other way round."""
    (tmp_path / "log.json").write_text(FILES[kind] + "\n")
    run = read_measured(tmp_path / "log.json")
    # Nanoseconds since 1970 are exact to a quarter of a microsecond.
    np.testing.assert_allclose(run.requests.arrival_ms, [0.0, 500.0], atol=3e-4)
    assert run.requests.prompt_tokens.tolist() == [9, 8]
    assert run.requests.output_tokens.tolist() == [3, 2]
    np.testing.assert_allclose(run.first_ms, [200.0, 600.0], atol=3e-4)
    np.testing.assert_allclose(run.last_ms, [400.0, 900.0], atol=3e-4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({name: column for name, column in BENCH.items() if name != "itls"}), "no times of first"),
        (json.dumps({"guidellm_version": "0.6.0", "benchmarks": [{}]}), "no benchmark with its requests"),
        (json.dumps({"experiments": [{"requests": [genai_perf(1, (2, 3), None)]}]}), "has no lengths of 1 of 1"),
        (json.dumps({"experiments": [{"requests": 3, "x": {"response_timestamps": 0}}]}), "no experiment with its"),
        (json.dumps([FAILED]), "there is no request in it"),
        (json.dumps([{"start_time": "x", "end_time": None, "info": {"input_tokens": []}}]), "."),
        (json.dumps({"request_throughput": {"avg": 3}, "request_latency": {"avg": 1}}), "holds statistics of a run"),
        (json.dumps({"load_summary": {}, "successes": {"count": 1}}), "holds statistics of a run"),
    ],
)
def test_result_files_without_times_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log.json").write_text(text)
    with pytest.raises(BadInput, match=said):
        read_measured(tmp_path / "log.json")
