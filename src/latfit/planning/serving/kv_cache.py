"""Compute an engine's KV blocks, and a model's weights: docs/theory/planning.md, "KV blocks".

A sliding window counts as full attention.
"""

from collections.abc import Mapping
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

from latfit.errors import BadInput, WrongUsage
from latfit.profiling import read_config
from latfit.units import format_bytes, format_percent

Config = Mapping[str, Any]
"""A config.json with `text_config` unfolded (`profiling.read_config`)."""

GIB = 2**30
UTILISATION = 0.9  # vLLM's default of `gpu_memory_utilization`; the newest versions take 0.92
BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 256, 2048  # vLLM's defaults
SAMPLING_BYTES = 16
WHERE = "config.json"
AUTO = (None, "auto", "")

BYTES: Mapping[str, float] = {
    "float32": 4, "fp32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
}

WITHOUT_FORMULA = (
    "is_encoder_decoder", "num_kv_shared_layers", "index_topk", "full_attention_interval", "attn_layer_period",
    "layers_block_type", "hybrid_override_pattern", "linear_attn_config",
)  # fmt: skip
WITH_KV_CACHE = ("full_attention", "sliding_attention", "chunked_attention")
LLAMA_LIKE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "phi3", "olmo2", "olmoe", "granite",
    "internlm2", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
FAMILIES: Mapping[str, tuple[int, bool]] = {
    **dict.fromkeys(LLAMA_LIKE, (3, False)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (3, True)),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt", "starcoder2", "falcon"), (2, True)),
    **dict.fromkeys(("gpt_neox", "phi"), (2, False)),
}
"""`model_type` -> matrices of the MLP, and whether the embedding serves as output head by default."""
GIVE_WEIGHTS = "Give the size of the weights, as the engine's log has it (`Model loading took … GiB`)."


class KvCache(NamedTuple):
    """The KV cache of one engine. blocks: with the null block, as engines report them."""

    blocks: int
    block_size: int
    how: str


def kv_cache_of(
    config: Config,
    *,
    gpu_memory: float | None = None,
    utilisation: float = UTILISATION,
    kv_memory: float | None = None,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
) -> KvCache:
    """Compute the KV cache of one engine from the bytes of a GPU, or those of its cache, as vLLM does.

    kv_dtype: None for the model's. Raises BadInput, and WrongUsage if no memory is left.
    """
    if not 0 < utilisation <= 1:
        found, remedy = f"a share of {utilisation:g}", "Give one above 0, up to 1."
        raise WrongUsage(found, where="--set gpu_memory_utilization", remedy=remedy)
    per_token = kv_bytes_per_token(config, kv_dtype, tensor_parallel)
    if kv_memory is not None:
        free, parts, estimated = kv_memory, f"{format_bytes(kv_memory)} of KV cache", ""
    elif gpu_memory is None:
        raise WrongUsage(
            "neither GPU memory nor that of the KV cache is given",
            where="KV cache",
            remedy="Give --gpu-memory 24564MiB or --set kv_memory=4GiB, or the --kv-blocks that the engine's log says.",
        )
    else:
        weights = weight_bytes(config) / tensor_parallel
        low, other, high = estimate_other_bytes(config, tensor_parallel)
        free = gpu_memory * utilisation - weights - other
        parts = (
            f"{format_bytes(gpu_memory)} of GPU memory at {format_percent(100 * utilisation)}, less"
            f" {format_bytes(weights)} of weights and {format_bytes(other)} of all else"
        )
        estimated = f" (estimated, {format_bytes(low)} to {format_bytes(high)})"
    blocks = floor(free / (per_token * BLOCK_SIZE))
    if blocks < 2:
        raise WrongUsage(
            f"{parts}: no KV block is left",
            where="KV cache",
            remedy="Give more memory, more GPUs (tensor parallel), a higher utilisation, or smaller weights.",
        )
    window = "; sliding windows counted as full attention" if has_sliding_window(config) else ""
    token = f"{per_token:,} bytes per token, {BLOCK_SIZE} tokens per block{window}"
    return KvCache(blocks, BLOCK_SIZE, f"computed from {parts}{estimated}: {token}")


def estimate_other_bytes(
    config: Config, tensor_parallel: int, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
) -> tuple[float, float, float]:
    """Estimate (low, estimate, high) the bytes on a GPU besides weights and KV cache."""
    hidden, active = _size(config, "hidden_size"), config.get("num_experts_per_tok")
    width = _size(config, "intermediate_size", 4 * hidden)
    if _experts(config) and isinstance(active, int):
        width = max(width, active * _size(config, "moe_intermediate_size", width))
    activations = 2 * max_num_batched_tokens * (4 * hidden + 3 * width / tensor_parallel)
    sampling = SAMPLING_BYTES * MAX_NUM_SEQS * int(config.get("vocab_size") or 0)
    together, shared = activations + sampling, tensor_parallel > 1
    return (
        max(activations, sampling) + 0.1 * GIB,
        together + (1.5 if shared else 0.5) * GIB,
        2 * together + (4 if shared else 2) * GIB,
    )


def model_config(path: Path) -> Config:
    """Read a config.json, or the one in a folder. Raises BadInput."""
    return read_config(path / "config.json" if path.is_dir() else path)


def kv_bytes_per_token(config: Config, dtype: str | None = None, tensor_parallel: int = 1) -> int:
    """Return the bytes of a token in the KV cache of one GPU. Raises BadInput, WrongUsage."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - set(WITH_KV_CACHE)) if isinstance(kinds, list) else []
    unknown = next((key for key in WITHOUT_FORMULA if config.get(key)), ", ".join(others))
    if unknown:
        remedy = "Take the size of the KV cache from the engine's log, or give --kv-blocks."
        raise BadInput(f"the model has {unknown}, whose memory no formula here covers", where=WHERE, remedy=remedy)
    width = number_bytes(model_dtype(config) if dtype in AUTO else dtype)
    layers = _size(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        return int(layers * (_size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim")) * width)
    heads, kv_heads = _size(config, "num_attention_heads"), _kv_heads(config)
    more, less = max(kv_heads, tensor_parallel), min(kv_heads, tensor_parallel)
    if tensor_parallel < 1 or heads % tensor_parallel or more % less:
        raise WrongUsage(
            f"{tensor_parallel} GPUs cannot share {heads} heads with {kv_heads} KV heads",
            where="--set tensor_parallel",
            remedy=f"Give a number that divides {heads}, and divides {kv_heads} or is a multiple of it.",
        )
    return int(2 * layers * max(1, kv_heads // tensor_parallel) * _head_dim(config) * width)


def has_sliding_window(config: Config) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return any(kind != "full_attention" for kind in kinds)
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False


def model_dtype(config: Config) -> str:
    """Return the number type that engines take by default: the config's, but float16 for float32."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float16" if name == "float32" else name


def number_bytes(dtype: str | None) -> float:
    """Return the bytes of a number. Raises WrongUsage."""
    name = str(dtype).removeprefix("torch.").lower()
    if name not in BYTES:
        raise WrongUsage(f"{dtype!r} is no number type", where="dtype", remedy=f"One of {', '.join(BYTES)}.")
    return BYTES[name]


def weight_bytes(config: Config) -> float:
    """Return the bytes of all weights, over all GPUs. Raises BadInput for an unknown family."""
    layers, rest = count_parameters(config)
    plain = number_bytes(model_dtype(config))
    quantised = config.get("quantization_config")
    return layers * (_quantised_bytes(quantised) if isinstance(quantised, dict) else plain) + rest * max(2.0, plain)


def _quantised_bytes(settings: Mapping[str, Any]) -> float:
    """Return the bytes of a quantised weight with its share of scale and zero point."""
    method = str(settings.get("quant_method"))
    groups = (settings.get("config_groups") or {}).values()
    bits = settings.get("bits") or settings.get("w_bit")
    for group in groups:
        bits = bits or (group.get("weights") or {}).get("num_bits")
    if method in ("fp8", "fbgemm_fp8") or settings.get("load_in_8bit"):
        bits = bits or 8
    elif settings.get("load_in_4bit"):
        bits = bits or 4
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        found = f"its weights are quantised in a way that is unknown here ({method})"
        raise BadInput(found, where=WHERE, remedy=GIVE_WEIGHTS)
    group_size = settings.get("group_size")
    return (bits + ((16 + bits) / group_size if isinstance(group_size, int) and group_size > 0 else 0.0)) / 8


def count_parameters(config: Config) -> tuple[int, int]:
    """Count the parameters of the layers with all experts, and of embedding and head. Raises BadInput."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        found = f"parameters of a model of type {config.get('model_type')!r} cannot be counted"
        raise BadInput(found, where=WHERE, remedy=GIVE_WEIGHTS)
    (matrices, tied), hidden = family, _size(config, "hidden_size")
    layers, experts = _size(config, "num_hidden_layers"), _experts(config)
    intermediate = _size(config, "intermediate_size", 4 * hidden)
    sparse = _sparse_layers(config, layers) if experts else 0
    total = layers * _attention(config) + (layers - sparse) * matrices * hidden * intermediate
    if sparse:
        width = _size(config, "moe_intermediate_size", intermediate)
        shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
        total += sparse * matrices * hidden * (experts * width + shared)
    heads = 1 if config.get("tie_word_embeddings", tied) else 2
    return total, heads * _size(config, "vocab_size") * _size(config, "word_embed_proj_dim", hidden)


def _attention(config: Config) -> int:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if not config.get("kv_lora_rank"):
        return 2 * hidden * (heads + _kv_heads(config)) * _head_dim(config)
    latent, rotated, plain, value = (
        _size(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    rank, query = config.get("q_lora_rank"), heads * (plain + rotated)
    queries = rank * (hidden + query) if rank else hidden * query
    return int(queries + hidden * (latent + rotated) + latent * heads * (plain + value) + heads * value * hidden)


def _sparse_layers(config: Config, layers: int) -> int:
    dense = config.get("mlp_only_layers") or []
    every = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    first = config.get("first_k_dense_replace") or 0
    return sum(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(layers))


def _experts(config: Config) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((_size(config, name) for name in names if config.get(name)), 0)


def _kv_heads(config: Config) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _size(config, "num_key_value_heads", _size(config, "num_attention_heads"))


def _head_dim(config: Config) -> int:
    return _size(config, "head_dim", _size(config, "hidden_size") // _size(config, "num_attention_heads"))


def _size(config: Config, name: str, default: int | None = None) -> int:
    value = next((config[key] for key in (name, *OTHER_NAMES.get(name, ())) if config.get(key) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if value == default else 1):
        found = f"has no {name}" if value is None else f"{name} = {value!r} is not a whole number above zero"
        raise BadInput(found, where=WHERE, remedy="Give the Hugging Face config.json of a decoder-only model.")
    return value
