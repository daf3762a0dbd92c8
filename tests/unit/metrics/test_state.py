"""What each engine publishes, by texts as their documentation has them, becomes the same record."""

import math
from io import BytesIO

import pytest

from latfit.errors import BadInput
from latfit.metrics.interval import Interval
from latfit.metrics.state import Buckets, ServerState, state_of

SGLANG = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m",tp_rank="0"} 1000.0
sglang:generation_tokens_total{model_name="m",tp_rank="0"} 400.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 700.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="1"} 700.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="m",tp_rank="0"} 300.0
sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 390.0
sglang:cuda_graph_passes_total{mode="decode_cuda_graph",model_name="m",tp_rank="0"} 90.0
sglang:cuda_graph_passes_total{mode="prefill_none",model_name="m",tp_rank="0"} 10.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:num_running_reqs{model_name="m",tp_rank="0"} 4.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 4.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 120000.0
sglang:page_size{model_name="m",tp_rank="0"} 1.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.0
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 6.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 10.0
sglang:time_to_first_token_seconds_count{model_name="m"} 10.0
"""
TRTLLM = """\
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 12.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 3.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.5
trtllm_request_success_total{engine_type="trtllm",finished_reason="stop",model_name="m"} 7.0
trtllm_request_success_total{engine_type="trtllm",finished_reason="length",model_name="m"} 3.0
trtllm_max_batch_size_runtime{engine_type="trtllm",model_name="m"} 256.0
trtllm_max_num_tokens_runtime{engine_type="trtllm",model_name="m"} 8192.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 6239.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
trtllm_time_per_output_token_seconds_count{engine_type="trtllm",model_name="m"} 10.0
trtllm_time_per_output_token_seconds_sum{engine_type="trtllm",model_name="m"} 0.2
"""
TRITON = """\
nv_inference_request_success{{model="small",version="1"}} {small}
nv_inference_count{{model="small",version="1"}} {small}
nv_inference_exec_count{{model="small",version="1"}} {small}
nv_inference_compute_infer_duration_us{{model="small",version="1"}} 10
nv_inference_request_success{{model="large",version="1"}} {requests}
nv_inference_count{{model="large",version="1"}} {requests}
nv_inference_exec_count{{model="large",version="1"}} {batches}
nv_inference_compute_infer_duration_us{{model="large",version="1"}} {compute_us}
nv_inference_pending_request_count{{model="large",version="1"}} 5
"""
LLAMA = """\
llamacpp:prompt_tokens_total 16185
llamacpp:tokens_predicted_total 394
llamacpp:n_decode_total 125
llamacpp:requests_processing 1
llamacpp:requests_deferred 3
"""
OLD_VLLM = """\
vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:gpu_prefix_cache_hits_total{model_name="m"} 30.0
vllm:time_per_output_token_seconds_count{model_name="m"} 4.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.1
"""


def state(text: str) -> ServerState:
    return state_of(BytesIO(text.encode()), "it")


def test_sglang_of_two_ranks_is_one_engine() -> None:
    found = state(SGLANG)
    assert (found.engine, found.running, found.waiting, found.kv_usage) == ("SGLang", 4.0, 2.0, 0.28)
    assert found.facts == {"kv_capacity_tokens": 120_000, "block_size": 1}
    assert found.histograms["ttft"] == Buckets(10.0, 2000.0, [100.0, math.inf], [6.0, 10.0])
    step = Interval(ServerState("SGLang"), found, 2.0).mean_step()
    assert step is not None
    # 390 tokens decoded and 10 prompts of 700 tokens in 100 passes of 2 s
    assert (step["B"], step["S"], step["T_ms"]) == pytest.approx((4.0, 10.9, 20.0))


def test_tensorrt_llm_tells_its_limits_and_no_steps() -> None:
    found = state(TRTLLM)
    assert (found.running, found.waiting, found.counters["finished"]) == (12.0, 3.0, 10.0)
    assert found.facts == {
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_gpu_blocks": 6239, "block_size": 32,
    }  # fmt: skip
    assert found.histograms["tpot"].mean == pytest.approx(20.0)
    assert not found.live


def test_triton_is_the_model_that_computes_longest() -> None:
    """600 requests in 100 executions of 9 ms."""
    first = state(TRITON.format(small=7, requests=0, batches=0, compute_us=100))
    last = state(TRITON.format(small=9000, requests=600, batches=100, compute_us=100 + 600 * 9000))
    step = Interval(first, last, 10.0).mean_step()
    assert step == pytest.approx({"B": 6.0, "S": 6.0, "T_ms": 9.0, "window_ms": 10_000.0, "window_steps": 100.0})
    assert last.waiting == 5.0


def test_llama_cpp_tells_its_mean_step() -> None:
    """200 calls of 3 busy slots, then 50 of 5 in 1 s, with 400 tokens of prompts; the mean is since the start."""
    texts = [
        f"{LLAMA.replace('125', str(calls)).replace('16185', str(prompts))}llamacpp:n_busy_slots_per_decode {mean}\n"
        for calls, prompts, mean in ((200, 1000, 3.0), (250, 1400, (200 * 3 + 50 * 5) / 250))
    ]
    step = Interval(state(texts[0]), state(texts[1]), 1.0).mean_step()
    assert step is not None
    assert (step["B"], step["S"], step["T_ms"]) == pytest.approx((5.0, 5.0 + 400 / 50, 20.0))
    assert step["window_steps"] == 50


def test_names_of_earlier_versions() -> None:
    found = state(OLD_VLLM)
    assert (found.kv_usage, found.counters["prefix_hits"]) == (0.25, 30.0)
    assert found.histograms["itl"].mean == pytest.approx(25.0)
    assert "tpot" not in found.histograms


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>vllm:num_requests_running 3</html>", "vllm:{} 1", "\x00\xff"])
def test_what_is_no_engines_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="holds no metrics of vLLM, SGLang"):
        state(text)


def test_odd_lines_are_passed_over() -> None:
    odd = (
        'vllm:num_requests_running{a="}",b="\\""} NaN\nvllm:x{ 3\nvllm:num_requests_waiting 4 1700000000 # {x="y"} 1\n'
    )
    found = state(odd)
    assert (found.running, found.waiting) == (0.0, 4.0)


def test_a_share_within_a_limit_lies_between_the_buckets_around_it() -> None:
    seen = Buckets(10.0, 100.0, [10.0, 50.0, math.inf], [4.0, 9.0, 10.0])
    assert seen.share_within(50.0) == (0.9, 0.9)
    assert seen.share_within(20.0) == (0.4, 0.9)
    assert seen.share_within(80.0) == (0.9, 1.0)
    assert seen.share_within(1.0) == (0.0, 0.4)
    assert seen.since(Buckets(4.0, 10.0, [10.0, 50.0, math.inf], [1.0, 4.0, 4.0])).reached == [3.0, 5.0, 6.0]
