"""`latfit plan` for requests with lengths: its answer stands where the simulator of engines is asked the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace import Trace, write_trace

Captured = pytest.CaptureFixture[str]

LOAD = ("--rate", "12/s", "--lengths", "300:40")
LIMITS = ("--ttft", "600ms", "--tpot", "40ms")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit of T = 9 + 0.2 B + 0.03 S, measured up to 64 requests and 2,048 tokens."""
    folder = tmp_path_factory.mktemp("engine")
    B, S = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(7), 2.0 ** np.arange(12)))
    B, S = B[S >= B].repeat(4), S[S >= B].repeat(4)
    T = (9 + 0.2 * B + 0.03 * S) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
    write_trace(folder / "steps.parquet", Trace({"B": B, "S": S, "T_ms": T}))
    line = ["fit", str(folder / "steps.parquet"), "--model", "linear", "--quiet", "--path", "gpu"]
    line += ["--out", str(folder / "engine.fit.json"), "--hardware", str(folder / "hardware.json")]
    assert run(line) == 0
    return folder / "engine.fit.json"


def planned(fit: Path, capsys: Captured, *more: str, load: Sequence[str] = LOAD, code: int = 0) -> dict[str, Any]:
    line = ["plan", "--fit", str(fit), *load, *LIMITS, "--kv-blocks", "4000", "--json", *more]
    assert run(line) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def words_of(name: str, value: Any) -> list[str]:
    """A setting as an option of `latfit simulate engine`."""
    if value is None or value is False:
        return []
    if name == "synchronous":
        return ["--synchronous"]
    if name in ("max_num_seqs", "max_num_batched_tokens", "kv_blocks", "order", "batching"):
        return [f"--{name.replace('_', '-')}", str(value)]
    return ["--set", f"{name}={'yes' if value is True else value}"]


def write_conversations(path: Path, *, contents: bool) -> None:
    """Requests of two lengths; with the names of their blocks, of which each has the first two of the one before."""
    rows = []
    for i in range(600):
        row: dict[str, Any] = {"timestamp": 60 * i, "input_length": 1024 + 512 * (i % 2), "output_length": 20 + i % 30}
        if contents:
            row["hash_ids"] = [2 * (i // 10), 2 * (i // 10) + 1, 10_000 + i][: 2 + i % 2]
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize(
    ("load", "more"),
    [
        pytest.param(("--users", "60", "--think", "2s", "--lengths", "300:40"), (), marks=pytest.mark.nightly),
        (("--rate", "40/s", "--lengths", "300:40:0.6"), ("--class", "chat:0.3:ttft=300ms", "--class", "batch:0.7:20s")),
        pytest.param(
            ("--rate", "30/s", "--lengths", "300:40"), ("--set", "prefix_hit_rate=0.5"), marks=pytest.mark.nightly
        ),
        pytest.param(
            ("--rate", "60/s", "--lengths", "300:40"), ("--set", "route=least-loaded"), marks=pytest.mark.nightly
        ),
        pytest.param(("--arrivals", "plain.jsonl"), (), marks=pytest.mark.nightly),
        pytest.param(("--arrivals", "named.jsonl"), ("--set", "route=prefix"), marks=pytest.mark.nightly),
    ],
)
def test_every_figure_stands_in_the_simulator_too(
    fitted: Path, in_tmp: Path, capsys: Captured, load: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Users, classes, shared prefixes by a rate and by contents, routers and recordings."""
    for name in ("plain", "named"):
        write_conversations(Path(f"{name}.jsonl"), contents=name == "named")
    limits = ("--ttft", "1500ms", "--tpot", "60ms")
    found = planned(fitted, capsys, *limits, *more, load=load)
    line = ["simulate", "engine", "--fit", str(fitted), *load, "--replicas", str(found["replicas"]["value"])]
    if found["replicas"]["value"] > 1:
        line += ["--set", f"route={found['route']}"]
    line += [word for name, value in found["engine"].items() for word in words_of(name, value)]
    line += [word for word in more if word == "--class" or word.startswith(("chat:", "batch:"))]
    outcome = found["outcome"]
    if "--arrivals" not in load:
        line += ["--requests", str(found["simulated"]["requests"]), "--replications", str(outcome["replications"])]
    line += ["--ttft", "1500ms", "--tpot", "60ms", "--seed", str(found["seed"]), "--json"]
    assert run(line) == 0
    again = json.loads(capsys.readouterr().out)["runs"][0]
    # Of recorded requests the simulator makes one run, the plan several that differ by the noise of steps.
    off = 0.02 if "--arrivals" in load else 1e-12
    for metric in ("ttft_ms", "tpot_ms", "latency_ms", "itl_ms"):
        for name in ("mean", "p50", "p90", "p99"):
            assert again[metric][name] == pytest.approx(outcome[metric][name], rel=off)
    for name in ("throughput_per_s", "output_tokens_per_s", "slo_attainment", "kv_usage", "prefix_hit_rate"):
        assert again[name] == pytest.approx(outcome[name], rel=off)
    assert again["utilisation"]["engine"] == pytest.approx(outcome["utilisation"]["engine"], rel=off)
    assert [each["class"] for each in again["by_class"]] == [each["class"] for each in outcome["by_class"]]
    for one, other in zip(again["by_class"], outcome["by_class"], strict=True):
        assert one["ttft_ms"] == other["ttft_ms"]
        assert one["slo_attainment"] == other["slo_attainment"]
    told = {each["target"]: each["value_ms"] for each in found["targets"]}
    assert told["p99 TTFT"] == outcome["ttft_ms"]["p99"]
    assert told["p99 TPOT"] == outcome["tpot_ms"]["p99"]


def test_one_replica_less_misses_a_target(fitted: Path, capsys: Captured) -> None:
    found = planned(fitted, capsys, load=("--rate", "60/s", "--lengths", "300:40"))
    count = found["replicas"]["value"]
    assert count > 1
    assert all(each["met"] for each in found["targets"])
    assert not all(each["met"] for each in found["replicas"]["one_fewer"])
    given = planned(
        fitted, capsys, "--replicas", str(count - 1), load=("--rate", "60/s", "--lengths", "300:40"), code=5
    )
    assert given["feasible"] is False
    assert given["engine"] is None


def test_no_smaller_token_budget_carries_the_load(fitted: Path, capsys: Captured) -> None:
    """Of budgets that carry the same load the smallest is planned: half of it carries less."""
    found = planned(fitted, capsys)
    budget = found["engine"]["max_num_batched_tokens"]
    assert 256 < budget < 2048
    half = planned(fitted, capsys, "--set", f"max_num_batched_tokens={budget // 2}", "--replicas", "1")
    assert half["capacity_per_s"] < found["capacity_per_s"]


def test_steps_of_one_request_say_nothing_of_batches(in_tmp: Path, capsys: Captured) -> None:
    S = np.repeat(2.0 ** np.arange(12), 4)
    T = (9 + 0.03 * S) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(S)))
    write_trace(in_tmp / "one.parquet", Trace({"B": np.ones(len(S)), "S": S, "T_ms": T}))
    assert run(["fit", "one.parquet", "--model", "linear", "--quiet"]) == 0
    capsys.readouterr()
    line = ["plan", "--fit", "one.fit.json", "--rate", "3/s", "--lengths", "300:40", *LIMITS, "--kv-blocks", "4000"]
    assert run(line) == 4
    assert "All measured steps hold one request" in capsys.readouterr().err
    assert run([*line, "--set", "max_num_seqs=1"]) == 0


def test_nothing_is_planned_without_a_fit(in_tmp: Path, capsys: Captured) -> None:
    assert run(["plan", "--fit", "none.fit.json", *LOAD, *LIMITS]) == 3
    assert "error: none.fit.json: no such fit" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_schedule_of_a_day_that_grows(fitted: Path, in_tmp: Path, capsys: Captured) -> None:
    """Two windows of which the second has four times the requests; growth changes how many come, not when."""
    times = [*np.linspace(0, 299, 1500), *np.linspace(300, 600, 6000)]
    rows = [f"{t:.3f},300,40\n" for t in times]
    Path("day.csv").write_text("".join(["t_s,prompt_tokens,output_tokens\n", *rows]))
    more = ("--start-up", "30s", "--arrivals-window", "300s")
    as_it_came = planned(fitted, capsys, *more, load=("--arrivals", "day.csv"))
    grown = planned(fitted, capsys, *more, "--set", "growth=3x", load=("--arrivals", "day.csv"))
    rate = 3 * as_it_came["rate_per_s"]
    asked = planned(fitted, capsys, *more, "--rate", f"{rate}/s", load=("--arrivals", "day.csv"))
    for found, times_as_many in ((grown, 3), (asked, 3)):
        windows, before = found["schedule"]["windows"], as_it_came["schedule"]["windows"]
        assert [each["t_s"] for each in windows] == [each["t_s"] for each in before]
        for each, once in zip(windows, before, strict=True):
            assert each["rate_per_s"] == pytest.approx(times_as_many * once["rate_per_s"], rel=0.01)
            assert each["replicas"] >= once["replicas"]
        assert windows[1]["replicas"] > windows[0]["replicas"]
        assert found["schedule"]["feasible"]
        assert any("keeps its length: each request comes 3 times" in note for note in found["notes"])
    assert grown["replicas"]["value"] > as_it_came["replicas"]["value"]


def test_a_cache_computed_from_memory_limits(fitted: Path, in_tmp: Path, capsys: Captured) -> None:
    """2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token, so 1 GiB holds 512 blocks of 16."""
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    line = ["plan", "--fit", str(fitted), *LOAD, *LIMITS, "--json", "--model-config", "config.json"]
    assert run([*line, "--set", "kv_memory=1GiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"]["kv_blocks"] == 512
    assert "131,072 bytes per token" in found["kv_cache"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rate", "5/s", "--ttft", "1s"], "requests have no lengths"),
        (["--rate", "5/s", "--lengths", "300:40"], "there is no limit to keep"),
        (["--lengths", "300:40", "--ttft", "1s"], "no load is given"),
        (["--rate", "5/s", "--lengths", "x:40", "--ttft", "1s"], "is not a pair of lengths"),
        (["--rate", "5/s", "--lengths", "300:40:-1", "--ttft", "1s"], "is not a pair of lengths"),
        (["--rate", "5/s", "--lengths", "300:40", "--ttft", "p101:1s"], "is not a percentile"),
        (["--rate", "5/s", "--lengths", "300:40", "--e2e", "1s", "--sla", "2s"], "contradict"),
        (["--rate", "5/s", "--lengths", "300:40", "--e2e", "1s", "--set", "growth=no"], "is no growth"),
        (["--rate", "5/s", "--lengths", "300:40", "--ttft", "p95:1s", "--goodput", "99%"], "percentiles are given"),
        (["--rate", "5/s", "--users", "5", "--lengths", "300:40", "--ttft", "1s"], "contradict"),
        (["--rate", "5/s", "--lengths", "300:40", "--ttft", "1s", "--gpu-memory", "24GiB"], "Give --model-config"),
        ([], "there is no target"),
    ],
)
def test_what_is_refused(arguments: list[str], told: str, fitted: Path, capsys: Captured) -> None:
    assert (
        run(["plan", *(["--fit", str(fitted)] if "--sla" not in arguments[:1] and arguments else []), *arguments]) == 2
    )
    assert told in capsys.readouterr().err


def test_a_limit_below_a_request_alone_is_met_by_no_lower_rate(fitted: Path, capsys: Captured) -> None:
    assert run(["plan", "--fit", str(fitted), *LOAD, "--tpot", "5ms", "--quiet"]) == 5
    assert "hint: Give wider limits, or faster steps." in capsys.readouterr().err


def test_steps_smaller_than_a_chunk_support_no_plan_of_prompts(in_tmp: Path, capsys: Captured) -> None:
    """Of steps of up to 60 tokens no budget of 32 follows, which would cut a prompt into ten steps."""
    B, S = (axis.ravel() for axis in np.meshgrid([1.0, 2, 4, 8, 16], [1.0, 4, 16, 32, 48, 60]))
    B, S = B[S >= B].repeat(6), S[S >= B].repeat(6)
    T = (4 + 0.1 * B + 0.03 * S) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
    write_trace(Path("small.parquet"), Trace({"B": B, "S": S, "T_ms": T}))
    assert run(["fit", "small.parquet", "--model", "linear", "--quiet", "--out", "small.fit.json"]) == 0
    capsys.readouterr()
    found = planned(Path("small.fit.json"), capsys, load=("--rate", "2/s", "--lengths", "300:20"), code=4)
    assert found["engine"]["max_num_batched_tokens"] == 128
    assert "max_num_batched_tokens is above them" in " ".join(found["notes"])
    assert found["unsupported"]
    own = ("--set", "max_num_batched_tokens=60", "--set", "max_num_seqs=16")
    found = planned(Path("small.fit.json"), capsys, *own, load=("--rate", "2/s", "--lengths", "300:20"))
    assert found["engine"]["max_num_batched_tokens"] == 60
    assert "were tried" not in " ".join(found["notes"])


def test_a_cache_that_nobody_gives_is_unlimited(fitted: Path, in_tmp: Path, capsys: Captured) -> None:
    """In plans, simulations and validations, and each says so once."""
    rows = [f"{i / 4},300,40,{i / 4 + 0.05},{i / 4 + 1}\n" for i in range(60)]
    columns = "t_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"
    Path("run.csv").write_text("".join([columns, *rows]))
    for line in (
        ["plan", "--fit", str(fitted), *LOAD, *LIMITS],
        ["simulate", "engine", "--fit", str(fitted), *LOAD, "--requests", "5000", "--replications", "2"],
        ["validate", str(fitted), "run.csv", "--force"],
    ):
        assert run(line) == 0
        told = capsys.readouterr()
        assert (told.out + told.err).count("unlimited") == 1
        assert "--kv-blocks" in told.out + told.err
