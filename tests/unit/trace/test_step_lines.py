"""Readers of lines about steps: lines in the formats of the engines' sources, with steps of known size and time."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.trace.readers import Options, open_source, reader_for
from latfit.trace.table import Trace


def read(folder: Path, content: str) -> Trace:
    (folder / "log").write_text(content)
    source = open_source(folder / "log")
    return reader_for(source).read(source, Options())


def iteration(step: int, B: int, prompt: int, decode: int, before: str, *, rank: int = 0, new: bool = True) -> str:
    """A line of TensorRT-LLM with print_iter_log, as versions 1.2 (new) and 1.0 write it."""
    scheduled = f"num_scheduled_requests = {B}, kv_cache_util = 0.125, " if new else ""
    older = "" if new else f"num_scheduled_requests: {B}, "
    cached = ", 'cached_kv_tokens': 63821" if new else ""
    return (
        f"[08/19/2026-14:11:49] [TRT-LLM] [I] [_torch][RANK {rank}] iter = {step}, global_rank = {rank}, "
        f"rank = {rank}, {scheduled}currank_total_requests = 0/1, host_step_time = 4.08ms, "
        f"prev_device_step_time = {before}, timestamp = 2026-08-19 14:11:{step % 60:02d}, {older}"
        f"states = {{'num_ctx_requests': {int(prompt > 0)}, 'num_ctx_tokens': {prompt}, "
        f"'num_generation_tokens': {decode}{cached}}}"
    )


class TestTensorRtLlm:
    @pytest.mark.parametrize("new", [True, False])
    def test_time_of_a_step_is_in_the_next_line(self, new: bool, tmp_path: Path) -> None:
        lines = [
            iteration(1, 1, 512, 0, "N/A", new=new),
            iteration(2, 3, 128, 2, "243.13ms", new=new),
            iteration(3, 3, 0, 3, "61.5ms", new=new),
            iteration(4, 0, 0, 3, "12.25ms", new=new),  # the states are those of the step before
            iteration(5, 3, 0, 12, "1456.7ms", new=new),  # the idle time
        ]
        trace = read(tmp_path, "noise\n" + "\n".join(lines))
        assert trace["T_ms"].tolist() == pytest.approx([243.13, 61.5, 12.25, 1456.7, np.nan], nan_ok=True)
        assert trace["B"].tolist() == [1, 3, 3, 0, 3]
        assert trace["S"].tolist() == [512, 130, 3, 0, 12]
        assert trace["prefill_tokens"].tolist() == [512, 128, 0, 0, 0]
        assert trace["idle"].tolist() == [False, False, False, True, False]
        assert trace["t_s"].tolist() == [0, 1, 2, 3, 4]
        assert ("context_tokens" in trace) == new
        assert trace.provenance["format"] == "trtllm-log"


START = """\
[2026-08-11 17:16:03] server_args=ServerArgs(model_path='m', chunked_prefill_size=8192, max_running_requests=None)
[2026-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
"""


def decode(B: int, T_ms: float, *, mean: float | None = None, ranks: str = "TP0", more: str = "") -> str:
    """A line of SGLang behind steps of `mean` requests (B without) that took T_ms each."""
    rate = 1e3 * (mean or B) / T_ms
    return (
        f"[2026-08-11 17:18:03 {ranks}] Decode batch, #running-req: {B}, #token: {100 * B}, token usage: 0.25, {more}"
        f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 2, \n"
    )


def prefill(tokens: int, rate: float) -> str:
    return (
        f"[2026-08-11 17:18:04 TP0] Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, "
        f"token usage: 0.01, #running-req: 3, #queue-req: 1, #pending-token: 0, cuda graph: False, "
        f"input throughput (token/s): {rate:.2f}\n"
    )


class TestSglang:
    def test_windows_of_decode_steps(self, tmp_path: Path) -> None:
        log = START + "".join(decode(B, 12.5, mean=mean) for B, mean in ((8, 8), (8, 8), (8, 8), (6, 7)))
        trace = read(tmp_path, log)
        assert trace["B"].tolist() == [8, 7]
        assert trace["T_ms"] == pytest.approx([12.5, 12.5], rel=1e-4)
        assert trace["context_tokens"].tolist() == [800, 700]
        assert trace["window_steps"].tolist() == [40, 40]
        expected = {"kv_capacity_tokens": 665690, "max_num_batched_tokens": 8192, "max_num_seqs": 4096, "unsteady": 2}
        assert trace.provenance == {"format": "sglang-log", **expected}

    def test_changing_load_is_left_out(self, tmp_path: Path) -> None:
        log = "".join(decode(B, 12.5) for B in (8, 8, 2, 2))
        assert read(tmp_path, log)["B"].tolist() == [2]

    def test_single_steps(self, tmp_path: Path) -> None:
        start = START.replace("max_running_requests=None", "decode_log_interval=1")
        trace = read(tmp_path, start + 3 * decode(8, 12.5))
        assert "window_steps" not in trace

    def test_full_prefill_chunks(self, tmp_path: Path) -> None:
        """A chunk of 8,192 tokens in 100 ms: the next line has its rate."""
        log = START + prefill(8192, 3) + prefill(8192, 81920) + prefill(5, 81920) + prefill(5, 10) + 3 * decode(8, 9)
        trace = read(tmp_path, log)
        assert trace["S"].tolist() == [8192, 8]
        assert trace["T_ms"] == pytest.approx([100, 9], rel=1e-4)
        assert trace["prefill_requests"].tolist() == [1, 0]

    def test_ranks_and_stages(self, tmp_path: Path) -> None:
        """Data-parallel ranks have their own windows; later pipeline stages repeat the first."""
        names = ("DP0 TP0", "DP1 TP4", "DP1 TP4 PP1")
        trace = read(tmp_path, 3 * "".join(decode(4, 10 * (i + 1), ranks=name) for i, name in enumerate(names)))
        assert trace["T_ms"] == pytest.approx([10, 20], rel=1e-4)
        assert trace["replica"].tolist() == ["DP0/0", "DP1/0"]


# Rows that llama-batched-bench printed for a 4-bit model of 8 B on a GPU, published with its table.
TABLE = """\
main: n_kv_max = 16384, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = 99

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   512 |    128 |    1 |    640 |    0.071 |  7177.30 |    1.210 |   105.81 |    1.281 |   499.59 |
|   512 |    128 |   16 |  10240 |    1.019 |  8040.20 |    2.114 |   968.58 |    3.133 |  3268.11 |
"""


class TestLlamaBench:
    def test_table(self, tmp_path: Path) -> None:
        """16 prompts of 512 tokens are 4 calls of 2,048, so of 4 requests; 128 calls decode 16 requests."""
        trace = read(tmp_path, "ggml_cuda_init: found 1 CUDA devices\n" + TABLE)
        assert trace["B"].tolist() == [1, 1, 4, 16]
        assert trace["S"].tolist() == [512, 1, 2048, 16]
        expected = [1e3 * 512 / 7177.30, 1210 / 128, 1e3 * 2048 / 8040.20, 2114 / 128]
        assert trace["T_ms"] == pytest.approx(expected, rel=5e-4)
        assert trace["phase"].tolist() == ["prefill", "decode"] * 2
        assert trace["context_tokens"].tolist()[1::2] == [576, 16 * 576]
        assert set(trace["path"].tolist()) == {"gpu"}

    @pytest.mark.parametrize("layers", [0, -1])
    def test_json_lines(self, layers: int, tmp_path: Path) -> None:
        """A shared prompt is computed once; sequences that decode one after the other are steps of one request."""
        record: dict[str, float] = {
            "n_kv_max": 4096,
            "n_batch": 512,
            "n_ubatch": 512,
            "flash_attn": 0,
            "is_pp_shared": 1,
        }
        record |= {"is_tg_separate": 1, "n_gpu_layers": layers, "n_threads": 8, "pp": 1024, "tg": 32, "pl": 4}
        record |= {
            "n_kv": 1152,
            "t_pp": 0.5,
            "speed_pp": 2048.0,
            "t_tg": 2.56,
            "speed_tg": 50.0,
            "t": 3.06,
            "speed": 376.0,
        }
        trace = read(tmp_path, json.dumps(record) + "\n")
        assert (trace["B"].tolist(), trace["S"].tolist()) == ([1, 1], [512, 1])
        assert trace["T_ms"] == pytest.approx([250, 20])
        assert set(trace["path"].tolist()) == {"cpu" if layers == 0 else "gpu"}


@pytest.mark.parametrize(
    ("content", "name"),
    [(iteration(1, 1, 0, 1, "7ms"), "trtllm-log"), (START + 3 * decode(8, 10), "sglang-log"), (TABLE, "llama-bench")],
)
def test_each_format_is_detected(content: str, name: str, tmp_path: Path) -> None:
    assert read(tmp_path, content).provenance["format"] == name
