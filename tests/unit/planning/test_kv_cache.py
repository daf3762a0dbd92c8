"""KV blocks and weights of public models, against what their makers and vLLM print."""

from pathlib import Path
from typing import Any

import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.planning.serving.kv_cache import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    count_parameters,
    estimate_other_bytes,
    has_sliding_window,
    kv_bytes_per_token,
    kv_cache_of,
    model_config,
    weight_bytes,
)

GIB = 2**30
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}


def config(kind: str, hidden: int, layers: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    return {"model_type": kind, **sizes, **more}


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.1-8B": (8_030_261_248, LLAMA_8B),
    "Llama-2-7B": (6_738_415_616, config("llama", 4096, 32, 32, 32000, intermediate_size=11008)),
    "Qwen2.5-0.5B": (
        494_032_768,
        config(
            "qwen2", 896, 24, 14, 151936, num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True
        ),
    ),
    "Gemma-2-9B": (
        9_241_705_984,
        config("gemma2", 3584, 42, 16, 256000, num_key_value_heads=8, head_dim=256, intermediate_size=14336),
    ),
    "OPT-125M": (
        125_239_296,
        config("opt", 768, 12, 12, 50272, ffn_dim=3072, word_embed_proj_dim=768, max_position_embeddings=2048),
    ),
    "GPT-2": (
        124_439_808,
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    ),
    "StarCoder": (
        15_517_456_384,
        {
            "model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
            "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
        },
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        config("mixtral", 4096, 32, 32, 32000, num_key_value_heads=8, intermediate_size=14336, num_local_experts=8),
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        config(
            "qwen3_moe", 2048, 48, 32, 151936, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
            moe_intermediate_size=768, num_experts=128, mlp_only_layers=[],
        ),
    ),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        config(
            "deepseek_v2", 2048, 27, 16, 102400, intermediate_size=10944, moe_intermediate_size=1408,
            n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=None, **DEEPSEEK,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    """Norms, biases, routers and learned positions are left out."""
    count, sizes = PUBLISHED[name]
    assert sum(count_parameters(sizes)) == pytest.approx(count, rel=0.004 if count > 1e9 else 0.02)


def test_weights_take_what_vllm_printed() -> None:
    """Meta-Llama-3-8B: `model weights take 14.96GiB`; on two GPUs 7.48 each (vLLM's pull request 10511)."""
    assert weight_bytes(LLAMA_8B) / 2**30 == pytest.approx(14.96, abs=0.005)


def test_quantised_weights_take_what_vllm_printed() -> None:
    """Qwen2.5-7B in AWQ, 4 bits in groups of 128: `Loading model weights took 5.2032 GB` (vLLM's issue 13882)."""
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128}
    sizes = config(
        "qwen2", 3584, 28, 28, 152064, num_key_value_heads=4, intermediate_size=18944, tie_word_embeddings=False,
        torch_dtype="float16", quantization_config=quantised,
    )  # fmt: skip
    assert sum(count_parameters(sizes)) == pytest.approx(7_615_616_512, rel=1e-3)
    assert weight_bytes(sizes) / 2**30 == pytest.approx(5.2032, rel=0.005)


def test_eight_bits_halve_the_layers_and_leave_the_embeddings() -> None:
    embeddings = 2 * 128256 * 4096 * 2
    halved = weight_bytes({**LLAMA_8B, "quantization_config": {"quant_method": "fp8"}})
    assert halved - embeddings == pytest.approx((weight_bytes(LLAMA_8B) - embeddings) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel", "dtype", "expected"),
    [
        (LLAMA_8B, 1, None, 131_072),
        (LLAMA_8B, 2, None, 65_536),
        (LLAMA_8B, 8, None, 16_384),
        (LLAMA_8B, 16, None, 16_384),  # 8 KV heads on 16 GPUs: one each, every one twice
        (LLAMA_8B, 1, "fp8_e4m3", 65_536),
        (LLAMA_8B, 1, "auto", 131_072),
        ({**LLAMA_8B, "torch_dtype": "float32"}, 1, None, 131_072),  # served in 16 bits
        ({**LLAMA_8B, "head_dim": 64}, 1, None, 65_536),
        (PUBLISHED["Llama-2-7B"][1], 1, None, 524_288),
        (PUBLISHED["StarCoder"][1], 1, None, 2 * 40 * 128 * 2),  # all query heads share one
        (PUBLISHED["DeepSeek-V2-Lite"][1], 1, None, 27 * 576 * 2),  # latent attention
        (PUBLISHED["DeepSeek-V2-Lite"][1], 8, None, 27 * 576 * 2),
    ],
)
def test_bytes_of_a_token(sizes: dict[str, Any], tensor_parallel: int, dtype: str | None, expected: int) -> None:
    assert kv_bytes_per_token(sizes, dtype, tensor_parallel) == expected


@pytest.mark.parametrize("tensor_parallel", [0, 3, 64])
def test_gpus_that_cannot_share_the_heads_are_refused(tensor_parallel: int) -> None:
    with pytest.raises(WrongUsage, match="cannot share 32 heads with 8 KV heads"):
        kv_bytes_per_token(LLAMA_8B, None, tensor_parallel)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_key_value_heads": [8, 4]}, "is not a whole number above zero"),
        ({"hidden_size": 0}, "is not a whole number above zero"),
    ],
)
def test_what_the_formula_does_not_know_is_refused(more: dict[str, Any], found: str) -> None:
    with pytest.raises(BadInput, match=found):
        kv_bytes_per_token({**LLAMA_8B, **more})


def test_unknown_kinds_of_models_and_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match="'novel' cannot be counted"):
        count_parameters({**LLAMA_8B, "model_type": "novel"})
    with pytest.raises(BadInput, match=r"unknown here \(gguf\)"):
        weight_bytes({**LLAMA_8B, "quantization_config": {"quant_method": "gguf"}})
    with pytest.raises(WrongUsage, match="no number type"):
        kv_bytes_per_token(LLAMA_8B, "fp7")


def test_sliding_windows_are_noticed() -> None:
    assert has_sliding_window({"sliding_window": 4096})
    assert has_sliding_window({"layer_types": ["full_attention", "sliding_attention"]})
    assert not has_sliding_window({"sliding_window": 32768, "use_sliding_window": False})
    assert not has_sliding_window({"sliding_window": None})


class TestFromMemory:
    def test_a_part_of_a_block_is_none(self) -> None:
        block = 131_072 * 16
        assert kv_cache_of(LLAMA_8B, kv_memory=101 * block - 1).blocks == 100
        assert kv_cache_of(LLAMA_8B, kv_memory=101 * block).blocks == 101

    def test_what_is_left_of_a_gpu_is_divided(self) -> None:
        """A block on each of two GPUs takes 1 MiB."""
        found = kv_cache_of(LLAMA_8B, gpu_memory=80 * GIB, utilisation=0.5, tensor_parallel=2)
        assert found.blocks == (40 * GIB - weight_bytes(LLAMA_8B) / 2 - estimate_other_bytes(LLAMA_8B, 2)[1]) // 2**20

    def test_a_cache_of_8_bits_holds_twice_as_much(self) -> None:
        assert kv_cache_of(LLAMA_8B, kv_memory=20 * GIB).blocks == 10_240
        assert kv_cache_of(LLAMA_8B, kv_memory=20 * GIB, kv_dtype="fp8").blocks == 20_480

    @pytest.mark.parametrize(
        ("memory", "found"),
        [
            ({}, "neither GPU memory nor that of the KV cache"),
            ({"gpu_memory": 16 * GIB}, "of all else: no KV block is left"),
            ({"kv_memory": 1e6}, "of KV cache: no KV block is left"),
            ({"gpu_memory": 80 * GIB, "utilisation": 1.2}, "a share of 1.2"),
        ],
    )
    def test_too_little_memory_is_refused(self, memory: dict[str, float], found: str) -> None:
        with pytest.raises(WrongUsage, match=found):
            kv_cache_of(LLAMA_8B, **memory)  # type: ignore[arg-type]


PRINTED: dict[str, tuple[dict[str, Any], float, int, int, int]] = {
    # vLLM's pull request 10511: 79.22 GiB at 0.90, 53.29 GiB for the cache; on two GPUs 71.29 - 7.48 - 3.58 - 1.26
    "Llama-3-8B, H100": (LLAMA_8B, 0.9 * 79.22, 1, 8192, int(53.29 * 512)),
    "Llama-3-8B, two H100": (LLAMA_8B, 0.9 * 79.22, 2, 8192, int(58.97 * 1024)),
    # pull request 2031: `# GPU blocks: 7351` on an A100 of 80 GB
    "Llama-2-7B, A100": (
        {**PUBLISHED["Llama-2-7B"][1], "torch_dtype": "float16"}, 0.9 * 79.15, 1, 4096, 7351
    ),
    # kvcached's pull request 448: 36.33 GiB at 0.92, 34.70 GiB for the cache
    "Qwen2.5-0.5B, A100": (
        {**PUBLISHED["Qwen2.5-0.5B"][1], "torch_dtype": "bfloat16"}, 36.33, 1, MAX_NUM_BATCHED_TOKENS,
        int(34.70 * GIB / (12_288 * 16)),
    ),
    # the serving run beside the checkout (vLLM 0.19): 2,588 blocks on an RTX 4090, utilisation taken as the default
    "Llama-3.1-8B, RTX 4090": (LLAMA_8B, 0.9 * 23.52, 1, MAX_NUM_BATCHED_TOKENS, 2588),
}  # fmt: skip
"""Sizes, GiB that the engine may use, GPUs, tokens of a step, and the blocks that it printed."""


@pytest.mark.parametrize("name", PRINTED)
def test_the_estimate_holds_what_vllm_printed(name: str) -> None:
    sizes, usable_gib, gpus, tokens, printed = PRINTED[name]
    block = BLOCK_SIZE * kv_bytes_per_token(sizes, None, gpus)
    left = usable_gib * GIB - weight_bytes(sizes) / gpus
    least, estimate, most = estimate_other_bytes(sizes, gpus, tokens)
    assert (left - estimate) / block == pytest.approx(printed, rel=0.04)
    assert least <= left - printed * block <= most


def test_a_config_is_read_from_its_file_or_folder(in_tmp: Path) -> None:
    (in_tmp / "config.json").write_text('{"text_config": {"hidden_size": 64}, "model_type": "outer"}')
    assert model_config(in_tmp)["hidden_size"] == model_config(in_tmp / "config.json")["hidden_size"] == 64
