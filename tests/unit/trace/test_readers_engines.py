"""Readers of engine records: what a step is in each source, and what survives of broken files."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.trace.readers import engines
from latfit.trace.readers.source import Options, Reader, open_source
from latfit.trace.table import Trace

TRT = (
    '{"cpuMemUsage":0,"gpuMemUsage":58941767680,"inflightBatchingStats":{"avgNumDecodedTokensPerIter":0.0,'
    '"microBatchId":0,"numContextRequests":1,"numCtxKvTokens":0,"numCtxTokens":13,"numGenKvTokens":0,'
    '"numGenRequests":0,"numPausedKvTokens":0,"numPausedRequests":0,"numScheduledRequests":1},"iter":1,'
    '"iterLatencyMS":52.06844902039,"kvCacheStats":{"allocNewBlocks":1632,"maxNumBlocks":5358,"tokensPerBlock":32,'
    '"usedNumBlocks":8},"maxNumActiveRequests":73,"numActiveRequests":1,"numQueuedRequests":2,'
    '"staticBatchingStats":null,"timestamp":"05-14-2026 02:51:10.302341"}'
)
FPM = (
    '{"timestamp":1250,"event":{"schema":"dynamo.fpm.trace.v1","source":{"namespace":"default","component":"backend",'
    '"producer_id":"4192"},"capture_mode":"full","observed_at_unix_ms":1782777601250,"fpm":{"version":1,'
    '"worker_id":"4192","dp_rank":0,"counter_id":42,"wall_time":0.025,"scheduled_requests":{"num_prefill_requests":2,'
    '"sum_prefill_tokens":256,"var_prefill_length":100.0,"sum_prefill_kv_tokens":64,"num_decode_requests":3,'
    '"sum_decode_kv_tokens":1024,"var_decode_kv_tokens":50.0},"queued_requests":{"num_prefill_requests":1,'
    '"sum_prefill_tokens":128,"var_prefill_length":0.0,"num_decode_requests":0,"sum_decode_kv_tokens":0,'
    '"var_decode_kv_tokens":0.0}}}}'
)
SGLANG = (
    '{"run_name": "default", "batch_size": 4, "input_len": 256, "output_len": 32, "prefill_latency": 0.123, '
    '"prefill_throughput": 8320.5, "median_decode_latency": 0.0045, "median_decode_throughput": 888.8, '
    '"total_latency": 0.267, "overall_throughput": 4314.6}'
)


def read(reader: Reader, folder: Path, content: str | bytes, options: Options | None = None) -> Trace:
    (folder / "log").write_bytes(content if isinstance(content, bytes) else content.encode())
    source = open_source(folder / "log")
    assert reader.recognises(source.head)
    return reader.read(source, options or Options())


def changed(line: str, **values: Any) -> dict[str, Any]:
    """The record in `line` with values replaced wherever their names occur."""

    def replaced(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: values[name] if name in values else replaced(inner) for name, inner in value.items()}

    record: dict[str, Any] = replaced(json.loads(line))
    return record


class TestTensorRtLlm:
    def test_a_prefill_step(self, tmp_path: Path) -> None:
        trace = read(engines.TRTLLM, tmp_path, f"[{TRT}]")
        assert {name: column.tolist() for name, column in trace.columns.items()} == {
            "B": [1],
            "S": [13],
            "T_ms": [52.06844902039],
            "prefill_requests": [1],
            "prefill_tokens": [13],
            "context_tokens": [0],
            "prefill_context_tokens": [0],
            "queued_requests": [2],
            "kv_usage": [8 / 5358],
            "step": [1],
            "idle": [False],
            "t_s": [0],
        }
        assert trace.provenance["latency_field"] == "iterLatencyMS"
        assert engines.TRTLLM.path == "gpu"

    def test_the_gpu_time_is_preferred_for_the_whole_file(self, tmp_path: Path) -> None:
        steps = [json.loads(TRT)] + [json.loads(TRT) | {"gpuForwardTimeMS": 7.5} for _ in range(3)]
        trace = read(engines.TRTLLM, tmp_path, json.dumps(steps))
        assert trace.provenance["latency_field"] == "gpuForwardTimeMS"
        assert trace.provenance["latency_missing"] == 1
        assert np.array_equal(trace["T_ms"], [np.nan, 7.5, 7.5, 7.5], equal_nan=True)

    def test_overlapped_steps_take_the_host_time_or_say_so(self, tmp_path: Path) -> None:
        step = json.loads(TRT) | {"schedulerMode": "overlap"}
        assert "overlap" in read(engines.TRTLLM, tmp_path, json.dumps(step)).provenance["note"]
        trace = read(engines.TRTLLM, tmp_path, json.dumps(step | {"hostStepTimeMS": 26.0}))
        assert (trace.provenance["latency_field"], trace["T_ms"].tolist()) == ("hostStepTimeMS", [26.0])

    def test_idle_iterations_survive_with_a_flag(self, tmp_path: Path) -> None:
        idle = changed(TRT, numContextRequests=0, numCtxTokens=0, iter=2)
        trace = read(engines.TRTLLM, tmp_path, f"{TRT}\n{json.dumps(idle)}\n")
        assert (trace["B"].tolist(), trace["idle"].tolist()) == ([1, 0], [False, True])

    def test_ranks_and_restarts_are_runs(self, tmp_path: Path) -> None:
        keys = [(0, 1), (1, 1), (0, 2), (1, 2), (0, 1), (1, 1)]
        lines = [json.dumps(changed(TRT, iter=i) | {"attentionDpRank": rank}) for rank, i in keys]
        trace = read(engines.TRTLLM, tmp_path, "\n".join(lines))
        assert trace["run"].tolist() == ["0#1", "1#1", "0#1", "1#1", "0#2", "1#2"]
        assert trace["replica"].tolist() == ["0", "1", "0", "1", "0", "1"]


class TestDynamo:
    def test_a_mixed_step(self, tmp_path: Path) -> None:
        trace = read(engines.DYNAMO, tmp_path, gzip.compress(FPM.encode()))
        assert {name: column.tolist() for name, column in trace.columns.items()} == {
            "B": [5],
            "S": [259],
            "T_ms": [25.0],
            "prefill_requests": [2],
            "prefill_tokens": [256],
            "context_tokens": [1088],
            "prefill_context_tokens": [64],
            "queued_requests": [1],
            "step": [42],
            "replica": ["4192/0"],
            "run": ["4192/0#1"],
            "idle": [False],
            "t_s": [0],
        }

    def test_lists_of_requests(self, tmp_path: Path) -> None:
        """Two prefills (200 and 56 tokens behind 64 and none) beside three that decode; a merged record has more."""
        event = json.loads(FPM)
        done = event["event"]["fpm"]["scheduled_requests"]
        done["extend_lengths"], done["past_kv_lengths"] = [200, 56, 1, 1, 1], [64, 0, 300, 300, 424]
        merged = json.loads(json.dumps(event))
        merged["event"]["fpm"]["scheduled_requests"]["extend_lengths"] = [200, 56, 1, 1, 1] * 2
        trace = read(engines.DYNAMO, tmp_path, json.dumps(event) + "\n" + json.dumps(merged))
        assert trace["prefill_attention"][0] == 200 * (64 + 100) + 56 * 28
        assert trace["longest_prefill"][0] == 264
        assert trace["prefill_attention"][1] == 256 * (64 + 128) / 2  # by averages
        assert trace.provenance["refused_lists"] == 1

    def test_flat_csv(self, tmp_path: Path) -> None:
        header = (
            "wall_time_s,prefill_tokens,prefill_kv_tokens,prefill_requests,decode_kv_tokens,decode_requests,"
            "queued_prefill_tokens,queued_decode_kv_tokens"
        )
        trace = read(engines.DYNAMO, tmp_path, f"{header}\n0.025,256,64,2,1024,3,128,0\n0,0,0,0,0,0,0,0\n")
        assert trace["S"].tolist() == [259, 0]
        assert trace["T_ms"].tolist() == [25, 0]
        assert trace["context_tokens"].tolist() == [1088, 0]
        assert trace["idle"].tolist() == [False, True]


class TestSglang:
    def test_a_line_is_a_prefill_and_a_decode_step(self, tmp_path: Path) -> None:
        trace = read(engines.SGLANG, tmp_path, SGLANG)
        assert {name: column.tolist() for name, column in trace.columns.items()} == {
            "B": [4, 4],
            "S": [1024, 4],
            "T_ms": [123.0, 4.5],
            "prefill_requests": [4, 0],
            "prefill_tokens": [1024, 0],
            "context_tokens": [0, 4 * (256 + 16)],
            "phase": ["prefill", "decode"],
            "run_name": ["default", "default"],
        }


class TestBrokenFiles:
    @pytest.mark.parametrize(
        ("reader", "line"), [(engines.TRTLLM, TRT), (engines.DYNAMO, FPM), (engines.SGLANG, SGLANG)]
    )
    def test_every_whole_line_is_read_and_the_others_counted(self, reader: Reader, line: str, tmp_path: Path) -> None:
        whole = read(reader, tmp_path, f"{line}\n{line}\n")
        foreign = ["INFO 12-22 21:44:40 ready", "[" * 100_000, '{"x": ' * 100_000, "1" * 5000, '{"a": 1}', "[1, null]"]
        content = "\n".join([line, *foreign, line, line[:-20]]).encode().replace(b"ready", b"\xff\xfe")
        broken = read(reader, tmp_path, content)
        assert broken["S"].tolist() == whole["S"].tolist()
        assert broken.provenance["bad_lines"] == len(foreign) + 1
        assert broken.provenance["cut_lines"] == 1
