"""KV blocks: by the formula, against what vLLM printed; and out of its logs."""

import gzip
import os
import re
from pathlib import Path
from typing import Any

import pytest

from latfit.errors import WrongUsage
from latfit.planning.serving.kv_cache import (
    GpuMemory,
    Served,
    kv_cache_of,
    model_config,
    other_bytes,
)
from latfit.planning.serving.model_size import kv_bytes_per_token, weight_bytes
from latfit.simulation import known_settings
from latfit.trace import engine_facts, open_source
from latfit.trace.readers.vllm import scan_log, start_facts
from tests.conftest import ROOT
from tests.unit.planning.test_model_size import LLAMA_8B, PUBLISHED, config

GIB = 2**30
MEASURED = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data"))
SMALL = config("llama", 512, 8, 8, 8000, num_key_value_heads=4, intermediate_size=1408, torch_dtype="bfloat16")
"""The model behind the recorded vLLM on a CPU."""


@pytest.fixture(scope="module")
def recorded() -> Path:
    """Folder of what a vLLM on a CPU wrote."""
    folder = MEASURED / "vllm_cpu"
    if not folder.is_dir():
        pytest.skip(f"no recorded engine at {folder}; set LATFIT_DATA to the folder that holds it")
    return folder


class TestFromMemory:
    def test_memory_of_the_cache_itself_is_exact(self) -> None:
        """A token of this model takes 2 · 8 layers · 4 heads · 64 numbers · 2 bytes; a block of 128 tokens is 1 MiB."""
        found = kv_cache_of(SMALL, GpuMemory(kv=2 * GIB), Served(block_size=128))
        assert found.blocks == 2048
        assert "2 GiB of KV cache: 8,192 bytes per token" in found.how

    def test_a_part_of_a_block_is_none(self) -> None:
        block = 131_072 * 16
        assert kv_cache_of(LLAMA_8B, GpuMemory(kv=101 * block - 1)).blocks == 100
        assert kv_cache_of(LLAMA_8B, GpuMemory(kv=101 * block)).blocks == 101

    def test_what_is_left_of_a_gpu_is_divided(self) -> None:
        """A block on each of two GPUs takes 1 MiB."""
        served = Served(tensor_parallel=2)
        found = kv_cache_of(LLAMA_8B, GpuMemory(gpu=80 * GIB, utilisation=0.5), served)
        assert found.blocks == (40 * GIB - weight_bytes(LLAMA_8B) / 2 - other_bytes(LLAMA_8B, served)[1]) // 2**20

    def test_a_cache_of_8_bits_holds_twice_as_much(self) -> None:
        memory = GpuMemory(kv=20 * GIB)
        assert kv_cache_of(LLAMA_8B, memory).blocks == 10_240
        assert kv_cache_of(LLAMA_8B, memory, Served(kv_dtype="fp8")).blocks == 20_480
        assert kv_cache_of(LLAMA_8B, memory, Served(dtype="fp8")).blocks == 10_240  # the weights alone

    def test_sliding_windows_are_named(self) -> None:
        assert "sliding windows" in kv_cache_of({**LLAMA_8B, "sliding_window": 4096}, GpuMemory(kv=GIB)).how
        assert "sliding windows" not in kv_cache_of(LLAMA_8B, GpuMemory(kv=GIB)).how

    @pytest.mark.parametrize(
        ("memory", "found"),
        [
            (GpuMemory(), "neither GPU memory nor that of the KV cache"),
            (GpuMemory(gpu=16 * GIB), "of all else: no KV block is left"),
            (GpuMemory(kv=1e6), "of KV cache: no KV block is left"),
        ],
    )
    def test_too_little_memory_is_refused(self, memory: GpuMemory, found: str) -> None:
        with pytest.raises(WrongUsage, match=found):
            kv_cache_of(LLAMA_8B, memory)

    def test_memory_that_says_two_things_or_nonsense_is_refused(self) -> None:
        with pytest.raises(WrongUsage, match="beside that from which it would be computed"):
            GpuMemory(gpu=80 * GIB, kv=GIB)
        with pytest.raises(WrongUsage, match="a share of 90"):
            GpuMemory(gpu=80 * GIB, utilisation=90)


PRINTED: dict[str, tuple[dict[str, Any], GpuMemory, Served, int]] = {
    # vLLM's pull request 10511: 79.22 GiB at 0.90, 53.29 GiB for the cache; on two GPUs 71.29 - 7.48 - 3.58 - 1.26
    "Llama-3-8B, H100": (
        LLAMA_8B,
        GpuMemory(gpu=79.22 * GIB),
        Served(max_num_batched_tokens=8192),
        int(53.29 * 512),
    ),
    "Llama-3-8B, two H100": (
        LLAMA_8B,
        GpuMemory(gpu=79.22 * GIB),
        Served(tensor_parallel=2, max_num_batched_tokens=8192),
        int(58.97 * 1024),
    ),
    # pull request 2031: `# GPU blocks: 7351` on an A100 of 80 GB
    "Llama-2-7B, A100": (
        {**PUBLISHED["Llama-2-7B"][1], "torch_dtype": "float16"},
        GpuMemory(gpu=79.15 * GIB),
        Served(max_num_batched_tokens=4096),
        7351,
    ),
    # kvcached's pull request 448: 36.33 GiB at 0.92, 34.70 GiB for the cache
    "Qwen2.5-0.5B, A100": (
        {**PUBLISHED["Qwen2.5-0.5B"][1], "torch_dtype": "bfloat16"},
        GpuMemory(gpu=36.33 / 0.92 * GIB, utilisation=0.92),
        Served(),
        int(34.70 * GIB / (12_288 * 16)),
    ),
    # the serving run beside the checkout (vLLM 0.19): 2,588 blocks on an RTX 4090, utilisation taken as the default
    "Llama-3.1-8B, RTX 4090": (LLAMA_8B, GpuMemory(gpu=23.52 * GIB), Served(), 2588),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_estimate_holds_what_vllm_printed(name: str) -> None:
    sizes, memory, served, printed = PRINTED[name]
    assert memory.gpu is not None
    assert kv_cache_of(sizes, memory, served).blocks == pytest.approx(printed, rel=0.04)
    tensor_parallel = served.tensor_parallel
    block = served.block_size * kv_bytes_per_token(sizes, served.cache_dtype, tensor_parallel)
    taken = memory.gpu * memory.utilisation - weight_bytes(sizes) / tensor_parallel - printed * block
    least, estimate, most = other_bytes(sizes, served)
    assert least < estimate < most
    assert least <= taken <= most


def test_published_memory_makes_the_published_blocks() -> None:
    """Llama-3.2-11B-Vision has 40 layers: 14.65 GiB made `# CUDA blocks: 6001` (pull request 12126)."""
    sizes = config("mllama_text_model", 4096, 40, 32, 128256, num_key_value_heads=8, torch_dtype="bfloat16")
    assert kv_cache_of(sizes, GpuMemory(kv=14.65 * GIB)).blocks == pytest.approx(6001, abs=2)


def in_log(log: Path, block_size: int | None = None) -> tuple[int, int]:
    """Blocks and block size as a log's start says them."""
    source = open_source(log)
    with source.open() as stream:
        facts = start_facts(scan_log(stream))
    values = known_settings(engine_facts([(source.name, facts)]), block_size).values
    return values["kv_blocks"], values["block_size"]


class TestInLogs:
    def test_the_recorded_log_says_what_the_formula_gives(self, recorded: Path) -> None:
        blocks, block_size = in_log(recorded / "server_rec1.log.gz")
        with gzip.open(recorded / "server_rec1.log.gz", "rt", errors="replace") as log:
            given = re.search(r"Explicitly set \(([\d.]+)/", log.read())
        assert given is not None
        computed = kv_cache_of(SMALL, GpuMemory(kv=float(given[1]) * GIB), Served(block_size=block_size))
        assert (blocks, block_size) == (2048, 128)
        assert (computed.blocks, computed.block_size) == (blocks, block_size)

    def test_the_recorded_metrics_say_the_same_blocks(self, recorded: Path) -> None:
        said = re.search(r'num_gpu_blocks="(\d+)"', (recorded / "metrics_rec1.txt").read_text())
        assert said is not None
        assert in_log(recorded / "server_rec1.log.gz")[0] == int(said[1])

    @pytest.mark.parametrize(
        ("lines", "block_size", "expected"),
        [
            ("INFO [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens", None, (9916, 16)),
            ("INFO [kv_cache_utils.py:634] GPU KV cache size: 158,656 tokens", 32, (4958, 32)),
            ("INFO [llm_engine.py:338] # GPU blocks: 7351, # CPU blocks: 2048", None, (7351, 16)),
            ("INFO [executor_base.py:95] # CUDA blocks: 6001, # CPU blocks: 1638", None, (6001, 16)),
            ("INFO non-default args: {'block_size': 64}\nINFO GPU KV cache size: 6,400 tokens", None, (100, 64)),
            ("INFO GPU KV cache size: 6,400 tokens\nINFO GPU KV cache size: 4,800 tokens", None, (300, 16)),
            (
                "Initializing a V1 LLM engine (v1)\nGPU KV cache size: 320 tokens\n"
                "Initializing a V1 LLM engine (v1)\nGPU KV cache size: 6,400 tokens",
                None,
                (400, 16),
            ),
        ],
    )
    def test_start_up_lines(self, in_tmp: Path, lines: str, block_size: int | None, expected: tuple[int, int]) -> None:
        log = in_tmp / "server.log"
        log.write_text(f"{lines}\n".replace("\nGPU", "\nINFO GPU"))
        assert in_log(log, block_size) == expected


def test_a_config_is_read_from_its_file_or_folder(in_tmp: Path) -> None:
    (in_tmp / "config.json").write_text('{"text_config": {"hidden_size": 64}, "model_type": "outer"}')
    assert model_config(in_tmp)["hidden_size"] == model_config(in_tmp / "config.json")["hidden_size"] == 64
