"""What prompts consist of, as recorded requests name it."""

import json
from pathlib import Path

import numpy as np
import pytest

import latfit
from latfit.workload import read_requests


def lines(tokens: int, *, partial: bool, unit_s: bool = False) -> list[str]:
    """Forty prompts that begin alike, of blocks of `tokens`; partial: the last block is named though it is a part."""
    found = []
    for i in range(40):
        prompt = 3 * tokens + 7 * i
        count = -(-prompt // tokens) if partial else prompt // tokens
        names = [900, *range(1000 * i, 1000 * i + count - 1)]
        when = {"chat_id": i, "timestamp": 0.5 * i} if unit_s else {"timestamp": 500 * i}
        found.append(json.dumps({**when, "input_length": prompt, "output_length": 5, "hash_ids": names}))
    return found


@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("partial", [True, False])
def test_the_size_of_a_block_is_the_one_that_fits(tokens: int, partial: bool, tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(lines(tokens, partial=partial)) + "\n")
    found = read_requests(file).requests
    assert found.prefix is not None
    assert found.prefix.tokens == tokens
    assert len(found.prefix.starts) == 41
    first = found.prefix.ids[found.prefix.starts[:-1]]
    assert set(first.tolist()) == {first[0]}
    assert len(set(found.prefix.ids.tolist())) == len(found.prefix.ids) - 39


def test_conversations_count_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "qwen.jsonl"
    file.write_text("\n".join(lines(16, partial=True, unit_s=True)) + "\n")
    assert read_requests(file).requests.arrival_ms[-1] == pytest.approx(19_500.0)


def test_names_that_fit_no_size_are_left_out_and_said(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    rows = [{"timestamp": i, "input_length": 100 + 77 * i, "output_length": 2, "hash_ids": [1, 2]} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = read_requests(file)
    assert found.requests.prefix is None
    assert any("hash_ids are not used" in each for each in found.notes)


@pytest.mark.parametrize("broken", [None, "a", 7, [[1], {}], [None]])
def test_a_broken_list_of_names_is_none(broken: object, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    row = {"input_length": 1000, "output_length": 2}
    rows = [{**row, "timestamp": i, "hash_ids": [1, 2 + i] if i else broken} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_requests(file).requests.prefix
    assert found is not None
    assert np.diff(found.starts).tolist() == [0] + [2] * 19


def test_rows_take_their_contents_along(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(lines(16, partial=True)) + "\n")
    requests = read_requests(file).requests
    for rows in (slice(3, 20, 4), np.array([1, 5, 30]), np.arange(40) % 3 == 0):
        some = requests.select(rows)
        assert requests.prefix is not None
        assert some.prefix is not None
        for new, old in enumerate(np.arange(40)[rows]):
            of_new = some.prefix.ids[some.prefix.starts[new] : some.prefix.starts[new + 1]]
            of_old = requests.prefix.ids[requests.prefix.starts[old] : requests.prefix.starts[old + 1]]
            assert of_new.tolist() == of_old.tolist()
    assert requests.at_rate(1.0).prefix is requests.prefix


def test_a_rate_that_is_given_goes_before_what_is_recorded(tmp_path: Path) -> None:
    """All forty prompts begin with one block of 512: of 40 requests 39 find it."""
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(lines(512, partial=True)) + "\n")
    fit = latfit.fit("sample_traces/cpu_openvino_bf16_smollm2-135m.parquet", model="linear")
    found = latfit.simulate_engine(fit, arrivals=file, kv_blocks=20_000)
    prompts = sum(3 * 512 + 7 * i for i in range(40))
    assert found.to_json()["runs"][0]["prefix_hit_rate"] == pytest.approx(39 * 512 / prompts)
    none = latfit.simulate_engine(fit, arrivals=file, kv_blocks=20_000, engine={"prefix_hit_rate": 0.0})
    assert none.to_json()["runs"][0]["prefix_hit_rate"] == 0.0


def test_a_plan_is_simulated_again_to_the_last_digit(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(lines(16, partial=True)) + "\n")
    fit = latfit.fit("sample_traces/cpu_openvino_bf16_smollm2-135m.parquet", model="linear")
    plan = latfit.plan_engine(fit, arrivals=file, ttft="5s", kv_blocks=2000)
    assert plan.replicas is not None
    engine = dict(plan.engine)
    batching, kv_blocks, order = engine.pop("batching"), engine.pop("kv_blocks"), engine.pop("order")
    assert engine["prefix_hit_rate"] is None
    again = latfit.simulate_engine(
        fit, arrivals=file, kv_blocks=kv_blocks, batching=batching, order=order, engine=engine, replicas=plan.replicas
    )
    told = plan.to_json()["outcome"]
    hits = again.to_json()["runs"][0]["prefix_hit_rate"]
    assert told["prefix_hit_rate"] == pytest.approx(hits, rel=1e-12)
    assert hits > 0
