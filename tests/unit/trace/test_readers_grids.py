"""Readers of measured grids: what a step is in each, against sums worked out by hand and against measured traces."""

from pathlib import Path

import pytest

from latfit.errors import BadInput
from latfit.trace.parquet import read_parquet
from latfit.trace.readers import simulators
from latfit.trace.readers.source import Options, Reader, open_source
from latfit.trace.table import Trace

SPLITWISE = """\
model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time,e2e_time,tensor_parallel
llama2-70b,a100-80gb,512,1,128,1.0023625,0.59930625,126.898329006508,44.31801987445261,5758.188962936401,4
bloom-176b,h100-80gb,1024,2,256,1.1,0.6,250.5,50.25,5796.4,8
"""

OPERATORS = ("emb", "input_layernorm", "attn_pre_proj", "mlp_down_proj", "add")
MEDIANS = (0.234, 0.105, 1.911, 1.604, 0.055)
SHAPE = "n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,use_gated_mlp,num_tokens,num_tensor_parallel_workers"

DENSE = """\
layer,tokens,time_us
layernorm,2,3
layernorm,1,2
down_proj,1,100
down_proj,2,140
embedding,1,5
embedding,2,7
final_layernorm,1,1
final_layernorm,2,1
"""
PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,1000\nlm_head,2,1010\nsampler,1,25\nsampler,2,25\n"
ATTENTION = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,10\n1,64,1,32,30\n16,0,1,16,90\n"
META = "hardware: RTX4090\nmodel: meta-llama/Llama-3.1-8B\nengine_effective:\n  model: /tmp/profiled\n"


def read(reader: Reader, path: Path) -> Trace:
    source = open_source(path)
    assert reader.recognises(source.head)
    return reader.read(source, Options())


def mlp(shape: str, tokens: int, medians: tuple[float | str, ...] = MEDIANS, extra: tuple[str, str] = ("", "")) -> str:
    statistics = ("min", "max", "mean", "median", "std")
    names = [f"time_stats.{operator}.{name}" for operator in OPERATORS for name in statistics]
    cells = [
        "" if value == "" else (str(value) if name == "median" else "9") for value in medians for name in statistics
    ]
    return f"{','.join(names)},{SHAPE}{extra[0]}\n{','.join(cells)},{shape},True,{tokens},2{extra[1]}\n"


class TestSplitwise:
    def test_a_line_is_a_prefill_and_a_decode_step(self, tmp_path: Path) -> None:
        (tmp_path / "p.csv").write_text(SPLITWISE)
        trace = read(simulators.SPLITWISE, tmp_path / "p.csv")
        assert trace["B"].tolist() == [1, 1, 2, 2]
        assert trace["S"].tolist() == [512, 1, 2048, 2]
        assert trace["T_ms"].tolist() == [126.898329006508, 44.31801987445261, 250.5, 50.25]
        assert trace["phase"].tolist() == ["prefill", "decode"] * 2
        assert trace["context_tokens"].tolist() == [0, 512 + 64, 0, 2 * (1024 + 128)]
        assert trace["prefill_tokens"].tolist() == [512, 0, 2048, 0]
        assert trace["hardware"].tolist() == ["a100-80gb"] * 2 + ["h100-80gb"] * 2
        assert trace["model"].tolist() == ["llama2-70b"] * 2 + ["bloom-176b"] * 2
        assert trace["tp"].tolist() == [4, 4, 8, 8]

    def test_the_measured_grid(self, measured_steps: Path) -> None:
        raw = measured_steps.parent / "raw" / "splitwise_perf_model.csv"
        if not raw.is_file():
            pytest.skip(f"no raw grid at {raw}")
        names = ["hardware", "model", "phase", "tp", "B", "S", "T_ms", "prefill_requests", "prefill_tokens"]
        names.append("context_tokens")
        ours = read(simulators.SPLITWISE, raw)
        theirs = read_parquet(measured_steps / "splitwise_a100_h100_tp4_tp8.parquet")
        rows = [sorted(zip(*(trace[name].tolist() for name in names), strict=True)) for trace in (ours, theirs)]
        assert rows[0] == rows[1]


def model_folder(folder: Path, model: str) -> Path:
    found = folder / "compute" / "a100" / "organisation" / model
    found.mkdir(parents=True)
    return found


class TestVidur:
    def test_operators_are_summed_over_layers(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path, "Llama-2-7b-hf")
        (folder / "mlp.csv").write_text(mlp("32,32,4096,11008,32768", 4096))
        trace = read(simulators.VIDUR, folder / "mlp.csv")
        assert (trace["B"].tolist(), trace["S"].tolist(), trace["tp"].tolist()) == ([1], [4096], [2])
        assert trace["T_ms"] == pytest.approx([0.234 + 32 * (0.105 + 1.911 + 1.604 + 2 * 0.055)])
        assert (trace["hardware"].tolist(), trace["model"].tolist()) == (["a100"], ["Llama-2-7b-hf"])
        assert trace.provenance["layers"] == [32]

    def test_an_unknown_model_asks_for_its_layers(self, tmp_path: Path) -> None:
        (tmp_path / "mlp.csv").write_text(mlp("7,7,77,777,7777", 1))
        with pytest.raises(BadInput, match="layers is not known") as caught:
            read(simulators.VIDUR, tmp_path / "mlp.csv")
        assert "n_layer" in caught.value.remedy
        (tmp_path / "mlp.csv").write_text(mlp("7,7,77,777,7777", 1, extra=(",n_layer", ",3")))
        trace = read(simulators.VIDUR, tmp_path / "mlp.csv")
        assert trace["T_ms"] == pytest.approx([0.234 + 3 * (0.105 + 1.911 + 1.604 + 2 * 0.055)])

    def test_its_attention_table_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("time_stats.attn_prefill.median,batch_size,kv_cache_size\n0.1,1,32\n")
        with pytest.raises(BadInput, match="not by num_tokens"):
            read(simulators.VIDUR, tmp_path / "a.csv")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "bf16" / "tp1"
    folder.mkdir(parents=True)
    (tmp_path / "bf16" / "meta.yaml").write_text(META)
    for name, content in (("dense", DENSE), ("per_sequence", PER_SEQUENCE), ("attention", ATTENTION)):
        (folder / f"{name}.csv").write_text(content)
    return folder


class TestLlmServingSim:
    def test_a_step_is_put_together_from_three_tables(self, tables: Path) -> None:
        trace = read(simulators.LLMSERVINGSIM, tables / "attention.csv")
        assert trace["B"].tolist() == [1, 2, 2]
        assert trace["S"].tolist() == [1, 2, 17]
        decode_us = 32 * (10 + 2 * 2 + 100) + 5 + 1 + 1000 + 25
        mixed_us = 32 * (30 + 2 * 3 + 140) + 7 + 1 + 1010 + 25
        assert trace["T_ms"][:2] == pytest.approx([decode_us / 1000, mixed_us / 1000])
        assert trace["context_tokens"].tolist() == [16, 64 + 32, 16]
        assert trace["prefill_context_tokens"].tolist() == [0, 64, 0]
        assert (trace["hardware"][0], trace["model"][0], trace["tp"][0]) == ("RTX4090", "meta-llama/Llama-3.1-8B", 1)

    @pytest.mark.parametrize("name", ["dense.csv", "per_sequence.csv"])
    def test_a_table_of_operators_points_to_the_steps(self, name: str, tables: Path) -> None:
        with pytest.raises(BadInput, match="single operators") as caught:
            read(simulators.LLMSERVINGSIM, tables / name)
        assert "attention.csv" in caught.value.remedy
        (tables / name).unlink()
        with pytest.raises(BadInput, match=f"no {name} beside"):
            read(simulators.LLMSERVINGSIM, tables / "attention.csv")

    def test_an_unknown_model_or_experts_are_refused(self, tables: Path) -> None:
        (tables.parent / "meta.yaml").write_text(META.replace("Llama-3.1-8B", "Nobody-1B"))
        with pytest.raises(BadInput, match="Nobody-1B"):
            read(simulators.LLMSERVINGSIM, tables / "attention.csv")
        (tables.parent / "meta.yaml").write_text(META)
        (tables / "moe.csv").write_text("tokens,activated_experts,time_us\n1,8,50\n")
        with pytest.raises(BadInput, match="experts"):
            read(simulators.LLMSERVINGSIM, tables / "attention.csv")
