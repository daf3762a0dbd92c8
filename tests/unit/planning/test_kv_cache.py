"""KV blocks: by the formula, against what vLLM printed; and out of its logs."""

import os
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
from tests.conftest import ROOT
from tests.unit.planning.test_model_size import LLAMA_8B, PUBLISHED, config

GIB = 2**30
MEASURED = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data"))
SMALL = config("llama", 512, 8, 8, 8000, num_key_value_heads=4, intermediate_size=1408, torch_dtype="bfloat16")
"""The model behind the recorded vLLM on a CPU."""


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


def test_a_config_is_read_from_its_file_or_folder(in_tmp: Path) -> None:
    (in_tmp / "config.json").write_text('{"text_config": {"hidden_size": 64}, "model_type": "outer"}')
    assert model_config(in_tmp)["hidden_size"] == model_config(in_tmp / "config.json")["hidden_size"] == 64
