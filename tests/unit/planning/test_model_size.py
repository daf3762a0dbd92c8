"""Parameters and KV bytes of public models, against what their makers publish."""

from typing import Any

import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.planning.serving.model_size import (
    count_parameters,
    has_sliding_window,
    kv_bytes_per_token,
    model_dtype,
    weight_bytes,
)

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


def test_parameters_of_a_large_model_of_experts_with_latent_attention() -> None:
    """DeepSeek-V3: 671 billion (its report), one head for the next token but one left out."""
    sizes = config(
        "deepseek_v3", 7168, 61, 128, 129280, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536, **DEEPSEEK,
    )  # fmt: skip
    assert sum(count_parameters(sizes)) == pytest.approx(671e9, rel=1e-3)


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
    halved = weight_bytes(LLAMA_8B, "fp8")
    assert halved - embeddings == pytest.approx((weight_bytes(LLAMA_8B) - embeddings) / 2, rel=1e-3)
    assert weight_bytes({**LLAMA_8B, "quantization_config": {"quant_method": "fp8"}}) == halved


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
    assert model_dtype({"dtype": "torch.bfloat16"}) == "bfloat16"
