"""Recorded requests: every format that is recognised can be read, and what is wrong with a file is named."""

import gzip
import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from latfit.errors import BadInput
from latfit.trace.readers import reader_for
from latfit.trace.readers.source import open_source
from latfit.workload.recordings import read_requests
from tests.conftest import ROOT


def aiperf(start_ns: int, error: object = None, phase: str = "profiling") -> str:
    metrics = {"input_sequence_length": {"value": 9, "unit": "tokens"}, "output_sequence_length": {"value": 3}}
    meta = {"request_start_ns": start_ns, "benchmark_phase": phase}
    return json.dumps({"metadata": meta, "metrics": metrics, "error": error}) + "\n"


def guidellm(**document: object) -> str:
    return json.dumps({**document}, indent=1)


NEW = {"request_start_time": 11.5, "prompt_tokens": 8, "output_tokens": 2}
OLD = {"start_time": 11.0, "prompt_tokens": 9, "output_tokens": 3}
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BENCH = {"ttfts": [0.1] * 3, "input_lens": [9, 9, 8], "output_lens": [3, 0, 2], "errors": ["", "boom", ""]}

FILES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,9,3\n2023-11-16 18:15:46.5,8,2\n",
    "azure_2024": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,9,3\n"
    "2024-05-10 00:00:00.509930+00:00,8,2\n",
    "mooncake": '{"timestamp": 1000, "input_length": 9, "output_length": 3, "hash_ids": [0]}\n'
    '{"timestamp": 1500, "input_length": 8, "output_length": 2, "hash_ids": [0]}\n',
    "latfit": "t_s,prompt_tokens,output_tokens\n0.0,9,3\n0.5,8,2\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.1,9,3\n0.6,8,2\n",
    "lines": '{"arrived_at": 0.1, "prompt_tokens": 9, "output_tokens": 3}\n'
    '{"arrived_at": 0.6, "prompt_tokens": 8, "output_tokens": 2}\n',
    "burstgpt": f"{BURST}5,ChatGPT,9,3,12,API log\n5.1,GPT-4,7,0,7,API log\n5.5,ChatGPT,8,2,10,API log\n",
    "vllm_bench": json.dumps({**BENCH, "start_times": [100.0, 100.2, 100.5]}),
    "aiperf": aiperf(10**18 + 500_000_000).replace('"value": 9', '"value": 8').replace('"value": 3', '"value": 2')
    + aiperf(10**18)
    + aiperf(10**18, error={"code": 500})
    + aiperf(10**18, phase="warmup"),
    "guidellm": guidellm(
        metadata={"guidellm_version": "0.6.0"},
        benchmarks=[{"requests": {"successful": [NEW, {**OLD, "request_start_time": 11.0}]}}],
    ),
    "guidellm_old": guidellm(
        benchmarks=[
            {"type_": "generative_benchmark", "requests": {"successful": [OLD, {**NEW, "start_time": 11.5}]}},
            {"type_": "generative_benchmark", "requests": {"successful": [OLD]}},
        ]
    ),
}


class TestFormats:
    @pytest.mark.parametrize("kind", FILES)
    def test_two_requests_half_a_second_apart(self, kind: str, tmp_path: Path) -> None:
        for content in (FILES[kind].encode(), gzip.compress(FILES[kind].encode())):
            (tmp_path / "log").write_bytes(content)
            found = read_requests(tmp_path / "log").requests
            # Nanoseconds since 1970 are exact to a quarter of a microsecond.
            assert found.arrival_ms.tolist() == pytest.approx([0.0, 500.0], abs=3e-4)
            assert found.prompt_tokens.tolist() == [9, 8]
            assert found.output_tokens.tolist() == [3, 2]
            assert reader_for(open_source(tmp_path / "log")).name == "arrivals"

    def test_what_was_left_out(self, tmp_path: Path) -> None:
        expected = {
            "burstgpt": {"no_output": 1},
            "vllm_bench": {"failed": 1},
            "aiperf": {"failed": 1, "warmup": 1},
            "latfit": {},
        }
        for kind, dropped in expected.items():
            (tmp_path / "log").write_text(FILES[kind])
            assert read_requests(tmp_path / "log").dropped == dropped
        (tmp_path / "log").write_text(FILES["guidellm_old"])
        assert "2 benchmarks" in read_requests(tmp_path / "log").notes[0]

    def test_optional_columns(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text(
            "t_s,prompt_tokens,output_tokens,class_id,user_id,deadline_ms\n0,1,1,1,5,20\n1,1,1,0,6,30\n"
        )
        found = read_requests(tmp_path / "log").requests
        assert found.class_id.tolist() == [1, 0]
        assert found.user_id.tolist() == [5, 6]
        assert found.deadline_ms.tolist() == [20, 30]


class TestWhenItBegan:
    """Counted from 1970 where a file tells; clocks that count from anything else tell nothing."""

    def began(self, content: str, tmp_path: Path) -> float | None:
        (tmp_path / "log").write_text(content)
        return read_requests(tmp_path / "log").began_s

    def test_by_moments_since_1970(self, tmp_path: Path) -> None:
        assert self.began(aiperf(1_700_000_000_500_000_000), tmp_path) == pytest.approx(1_700_000_000.5)
        requests = [{**NEW, "request_start_time": 1_700_000_011.5}, {**OLD, "request_start_time": 1_700_000_011.0}]
        benchmarks = [{"requests": {"successful": requests}}]
        assert self.began(guidellm(metadata={"guidellm_version": "0.6.0"}, benchmarks=benchmarks), tmp_path) == (
            pytest.approx(1_700_000_011.0)
        )

    def test_by_the_date_at_the_end_of_a_benchmark(self, tmp_path: Path) -> None:
        told = {**BENCH, "start_times": [100.0, 100.2, 100.5], "duration": 30.0, "date": "20260314-120030"}
        assert self.began(json.dumps(told), tmp_path) == datetime(2026, 3, 14, 12).timestamp()


class TestRefused:
    @pytest.mark.parametrize(
        ("content", "found"),
        [
            ("t_s,prompt_tokens,output_tokens\n1,9,3\n0,8,2\n", "request 2 arrives before"),
            ("t_s,prompt_tokens,output_tokens\n1,9,0\n", "request 1 needs output_tokens"),
            ("t_s,prompt_tokens,output_tokens\n1,x,2\n", "request 1 has nan as prompt_tokens"),
            ("t_s,prompt_tokens,output_tokens\n,9,2\n2,9,2\n", "request 1 has no arrival time"),
            ("t_s,prompt_tokens,output_tokens\n", "no request"),
            ("B,S,T_ms\n1,1,5\n", "no columns of request arrivals"),
            (json.dumps(BENCH), "no start times"),
            (json.dumps(BENCH)[:-20], "cut short"),
            (guidellm(benchmarks=[{"type_": "generative_benchmark"}]), "no benchmark with its requests"),
        ],
    )
    def test_named(self, content: str, found: str, tmp_path: Path) -> None:
        (tmp_path / "log").write_text(content)
        with pytest.raises(BadInput, match=found) as caught:
            read_requests(tmp_path / "log")
        assert caught.value.where == str(tmp_path / "log")
        assert caught.value.remedy


def test_measured_logs() -> None:
    folder = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "arrivals").is_dir():
        pytest.skip(f"no recorded arrivals at {folder}; set LATFIT_DATA")
    azure = read_requests(folder / "arrivals" / "azure2023_conv.csv").requests
    assert len(azure) == 19_366
    assert azure.arrival_ms[-1] / 60_000 == pytest.approx(58, abs=1)
    assert len(read_requests(folder / "raw" / "mooncake_conversation_head.jsonl").requests) == 400
    served = next((folder / "requests").glob("*.csv"))
    assert len(read_requests(served).requests) == 300


class TestDamaged:
    ROWS = "".join(f"{i},9,3\n" for i in range(9))

    @pytest.mark.parametrize("row", ["9,x,3", ",9,3", "9,0,3", "9,9,1e300", "nan,9,3", "9,9,9999999999", "inf,9,3"])
    def test_one_row_is_left_out_and_told(self, row: str, tmp_path: Path) -> None:
        (tmp_path / "log").write_text(f"t_s,prompt_tokens,output_tokens\n{self.ROWS}{row}\n")
        found = read_requests(tmp_path / "log")
        assert len(found.requests) == 9
        assert found.dropped == {"unreadable": 1}
        assert list(found.notes) == ["1 of 10 requests have no time or no length (the first is 10)"]

    @pytest.mark.parametrize("key", ["start_times", "input_lens", "output_lens", "ttfts", "itls"])
    @pytest.mark.parametrize(
        "odd", [None, "x", [], {}, [None], 1e308, [1e308] * 2, [float("inf"), float("-inf")], 10**400]
    )
    def test_a_result_of_vllm_bench_with_gaps(self, key: str, odd: object, tmp_path: Path) -> None:
        n = 5
        bench: dict[str, list[object]] = {
            "start_times": [1.0 * i for i in range(n)],
            "input_lens": [9] * n,
            "output_lens": [3] * n,
        }
        whole = bench | {"ttfts": [0.1] * n, "itls": [[0.01, 0.01]] * n, "errors": [""] * n}
        damaged = {**whole, key: [odd, *whole[key][1:]]}
        (tmp_path / "log").write_text(json.dumps(damaged))
        assert len(read_requests(tmp_path / "log").requests) >= n - 1
