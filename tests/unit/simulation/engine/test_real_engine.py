"""Settings of a simulated engine from what a real one's traces say."""

import pytest

from latfit.simulation.engine.real_engine import acceptance_of, known_settings, set_up_engine
from latfit.simulation.engine.settings import Speculation
from latfit.trace.serving_engine import engine_facts

RECORDED = {
    "vllm": "0.32.0",
    "block_size": 128,
    "kv_capacity_tokens": 262_144,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "async_scheduling": False,
}


def test_all_that_a_recorder_says() -> None:
    found = known_settings(engine_facts([("a.parquet", RECORDED)]))
    assert found.values == {
        "kv_blocks": 2048,
        "block_size": 128,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "synchronous": True,
    }
    assert set(found.origin.values()) == {"a.parquet"}
    assert not found.notes


@pytest.mark.parametrize(
    ("reported", "asynchronous"),
    [({"async_scheduling": True}, "asynchronous"), ({}, "asynchronous (assumed; --synchronous if not)")],
)
def test_the_settings_in_a_line(reported: dict[str, bool], asynchronous: str) -> None:
    log = {"vllm": "0.32.0", "kv_capacity_tokens": 41_408, **reported}
    drafts = {"draft_tokens": 2, "acceptance": 0.6, "draft_cost": 1.5}
    named = {"max_num_seqs": 128, "prefix_hit_rate": 0.25, **drafts}
    made = set_up_engine(engine_facts([("server.log", log)]), named, "chunked-prefill")
    assert made.settings.speculation == Speculation(2, 0.6, 1.5)
    assert made.line == (
        f"Engine: 2,588 KV blocks of 16, 128 requests and 2,048 tokens a step at most, {asynchronous}, 25 % of prompts"
        " cached, 2 draft tokens, accepted one after the other with 60 % (from server.log)."
    )


def test_blocks_follow_a_block_size_that_is_given() -> None:
    assert known_settings(engine_facts([("a", RECORDED)]), 64).values["kv_blocks"] == 4096


def test_what_a_log_leaves_out_is_said() -> None:
    log = {"vllm": "0.32.0", "kv_capacity_tokens": {"Engine 000": 41_408, "Engine 001": 41_600}}
    found = known_settings(engine_facts([("server.log", log)]))
    assert (found.values["block_size"], found.values["kv_blocks"]) == (16, 2588)
    for note, said in zip(found.notes, ("KV block", "max_num_seqs", "asynchronous assumed"), strict=True):
        assert said in note.text
    on_cpu = known_settings(engine_facts([("server.log", {**log, "device_type": "cpu"})]))
    assert (on_cpu.values["block_size"], on_cpu.values["kv_blocks"], on_cpu.values["max_num_seqs"]) == (128, 323, 128)
    assert on_cpu.values["synchronous"]
    assert on_cpu.origin["synchronous"] == "vLLM's default"


def test_traces_of_no_engine_say_nothing() -> None:
    assert known_settings(engine_facts([("sim", {"model": "llama", "format": "vidur"})])).values == {}


def test_a_fact_on_which_files_differ_is_nobodys() -> None:
    other = {**RECORDED, "max_num_seqs": 64}
    found = known_settings(engine_facts([("a", RECORDED), ("b", other)]))
    assert found.origin["max_num_seqs"] == "assumed"
    assert any("128, 64" in note.text and note.option == "--max-num-seqs" for note in found.notes)


def test_the_running_server_goes_before_the_trace() -> None:
    facts = engine_facts([("a", RECORDED)])
    found = known_settings(facts.overruled_by("the server", {"max_num_seqs": 4, "num_gpu_blocks": 100}))
    assert (found.values["max_num_seqs"], found.origin["max_num_seqs"]) == (4, "the server")
    assert found.values["kv_blocks"] == 100
    assert found.values["max_num_batched_tokens"] == 2048
    (note,) = found.notes
    assert "max_num_seqs 4 (128 in the trace)" in note.text
    same = known_settings(facts.overruled_by("the server", {"max_num_seqs": 128}))
    assert not same.notes


@pytest.mark.parametrize(("a", "k"), [(0.6, 2), (0.9, 3), (0.05, 8)])
def test_acceptance_from_the_mean_gain(a: float, k: int) -> None:
    assert acceptance_of(sum(a**i for i in range(1, k + 1)), k) == pytest.approx(a, abs=1e-9)


def test_drafts_and_cached_prompts_as_counted() -> None:
    """Of 1,000 requests that decoded 960 gained a token: 0.6 + 0.36 of two drafts."""
    did = {"draft_tokens": 2000.0, "accepted_tokens": 960.0, "decode_requests": 1000.0, "prefix_queries": 400.0}
    facts = engine_facts([("a", {**RECORDED, "num_speculative_tokens": 2})], {**did, "prefix_hits": 100.0})
    found = known_settings(facts)
    assert found.values["draft_tokens"] == 2
    assert found.values["acceptance"] == pytest.approx(0.6)
    assert found.values["prefix_hit_rate"] == 0.25
    assert found.origin["acceptance"] == "observed"
    uncounted = known_settings(
        engine_facts([("a", {**RECORDED, "num_speculative_tokens": 2})], {"decode_requests": 9.0})
    )
    assert "acceptance" not in uncounted.values  # the usual one, not none
