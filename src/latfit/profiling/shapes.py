"""Sizes of the model, and the shape of one step (a cell of the grid).

Models are presets or a HuggingFace config.json. The embedding and the language-model head are one matrix. A multiply
and an add count as two operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from latfit.errors import BadInput, WrongUsage
from latfit.inputs import read_json

Phase = Literal["decode", "prefill", "mixed"]

Part = Literal["step", "gemm", "attention"]  # the whole step, the products with weights, attention over the cache
PARTS: tuple[Part, ...] = ("step", "gemm", "attention")

GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer by its sizes. With `experts`, a token passes `active_experts` of them."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 4
    experts: int = 0
    active_experts: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def layer_parameters(self, experts: int) -> int:
        mlps = experts if self.experts else 1
        return self.hidden * (self.qkv_width + self.query_width + 3 * mlps * self.intermediate + self.experts)

    @property
    def parameters(self) -> int:
        return self.layers * (self.layer_parameters(self.experts) + 2 * self.hidden) + self.hidden * (self.vocab + 1)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number outside the weights: 8-bit weights meet 16-bit activations."""
        return max(2, self.dtype_bytes)


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """A cell: `decode_requests` with `context` cached tokens each; chunks of prompts behind `history` cached tokens."""

    decode_requests: int = 0
    context: int = 0
    prefill: tuple[int, ...] = ()
    history: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.history:
            msgspec.structs.force_setattr(self, "history", (0,) * len(self.prefill))
        if len(self.history) != len(self.prefill):
            raise ValueError(f"{len(self.history)} histories for {len(self.prefill)} chunks")
        if min(self.prefill, default=1) < 1 or min(self.decode_requests, self.context, *self.history, 0) < 0:
            raise ValueError(f"counts of tokens and requests must not be negative, chunks at least 1: {self}")
        if not self.decode_requests and not self.prefill:
            raise ValueError("a step needs at least one request")

    @property
    def B(self) -> int:
        return self.decode_requests + len(self.prefill)

    @property
    def S(self) -> int:
        return self.decode_requests + self.prefill_tokens

    @property
    def phase(self) -> Phase:
        if not self.prefill:
            return "decode"
        return "mixed" if self.decode_requests else "prefill"

    @property
    def prefill_requests(self) -> int:
        return len(self.prefill)

    @property
    def prefill_tokens(self) -> int:
        return sum(self.prefill)

    @property
    def prefill_context_tokens(self) -> int:
        return sum(self.history)

    @property
    def context_tokens(self) -> int:
        return self.decode_requests * self.context + self.prefill_context_tokens

    @property
    def cache_tokens(self) -> int:
        return self.context_tokens + self.S

    def __str__(self) -> str:
        context = f", {self.context_tokens} cached tokens" if self.context_tokens else ""
        return f"B={self.B} S={self.S} ({self.phase}{context})"


def step_flops(shape: ModelShape, cell: StepShape) -> float:
    pairs = float(cell.decode_requests * (cell.context + 1))
    pairs += sum(n * (before + (n + 1) / 2) for n, before in zip(cell.prefill, cell.history, strict=True))
    attention = 4.0 * shape.query_width * pairs * shape.layers
    return (
        2.0 * cell.S * shape.layers * shape.layer_parameters(shape.active_experts)
        + attention
        + 2.0 * cell.B * shape.hidden * shape.vocab
    )


def step_bytes(shape: ModelShape, cell: StepShape) -> int:
    """Return the memory of a step besides the weights: cache, and activations of the widest layer."""
    widths = 3 * shape.hidden + 2 * shape.qkv_width + shape.query_width + 3 * shape.intermediate
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * cell.cache_tokens
    return (cached + cell.S * widths + cell.B * shape.vocab) * shape.activation_bytes


def check_fits(shape: ModelShape, free_bytes: int | None) -> None:
    """Raise WrongUsage if the weights take more than nine tenths of the free memory."""
    if free_bytes is None or shape.weight_bytes <= 0.9 * free_bytes:
        return
    per_layer = shape.layer_parameters(shape.experts) * shape.dtype_bytes
    layers = int((0.9 * free_bytes - (shape.weight_bytes - shape.layers * per_layer)) // per_layer)
    remedy = f"Measure fewer of its layers (--layers {layers})." if layers >= 1 else "Choose a smaller --model."
    found = f"its weights take {shape.weight_bytes / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB are free"
    raise WrongUsage(found, where=f"model {shape.name}", remedy=remedy)


# `tiny` has 55 MB of weights, more than most caches hold: a small step waits for memory and a large one for arithmetic,
# and still takes only milliseconds on two cores. The others are public models.
PRESETS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", 512, 4, 8, 4, 64, 1408, 4096),
        ModelShape("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152),
        ModelShape("smollm2-360m", 960, 32, 15, 5, 64, 2560, 49152),
        ModelShape("qwen2.5-0.5b", 896, 24, 14, 2, 64, 4864, 151936),
        ModelShape("tinyllama-1.1b", 2048, 22, 32, 4, 64, 5632, 32000),
        ModelShape("llama-3.2-1b", 2048, 16, 32, 8, 64, 8192, 128256),
        ModelShape("qwen2.5-1.5b", 1536, 28, 12, 2, 128, 8960, 151936),
        ModelShape("llama-3.2-3b", 3072, 28, 24, 8, 128, 8192, 128256),
        ModelShape("olmoe-1b-7b", 2048, 16, 16, 16, 128, 1024, 50304, experts=64, active_experts=8),
        ModelShape("mistral-7b", 4096, 32, 32, 8, 128, 14336, 32768),
        ModelShape("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        ModelShape("tiny-moe", 512, 4, 8, 4, 64, 704, 4096, experts=8, active_experts=2),
    )
}

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_UNSUPPORTED: Mapping[str, str] = {
    "n_shared_experts": "experts that every token passes",
    "shared_expert_intermediate_size": "an expert that every token passes",
    "first_k_dense_replace": "dense layers beside those with experts",
    "kv_lora_rank": "latent attention",
    "is_encoder_decoder": "an encoder beside the decoder",
}


def model_shape(name: str, layers: int | None = None) -> ModelShape:
    """Return a preset, or the shape in a config.json. Raises BadInput, WrongUsage for too few layers."""
    if layers is not None and layers < 1:
        raise WrongUsage(f"{layers} layers is too few", where="--layers", remedy="Ask for 1 or more.")
    path = Path(name)
    if name in PRESETS:
        shape = PRESETS[name]
    elif path.is_dir():
        shape = from_config(path / "config.json")
    elif path.suffix == ".json" or path.exists():
        shape = from_config(path)
    else:
        remedy = f"Name a config.json, or one of {', '.join(PRESETS)}."
        raise BadInput(f"no preset and no file is called {name!r}", where="--model", remedy=remedy)
    if layers in (None, shape.layers):
        return shape
    return replace(shape, layers=layers, name=f"{shape.name}-{layers}layers")


def from_config(path: Path) -> ModelShape:
    """Return the shape in a config.json. Raises BadInput for a model that no device computes."""
    config = read_config(path)
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise _bad(path, f"{key} = {config[key]!r} means {what}, which cannot be measured yet")

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if value is None:
            raise _bad(path, f"has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _bad(path, f"{key} = {value!r} is not a whole number above zero")
        return value

    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    hidden, layers, heads, intermediate, vocab = map(size, sizes)
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", max(hidden // heads, 1))
    experts = active = 0
    if (counted := next((name for name in _EXPERTS if config.get(name)), None)) and size(counted) > 1:
        experts, active = size(counted), size("num_experts_per_tok")
        intermediate = size("moe_intermediate_size", intermediate)
    if heads % kv_heads or head_dim % 2 or active > experts:
        found = f"{heads} heads of {head_dim} on {kv_heads} key heads, {active} of {experts} experts"
        raise _bad(path, f"its sizes cannot be computed: {found}")
    named = config.get("_name_or_path")
    name = named.strip("/ ").rsplit("/", 1)[-1] if isinstance(named, str) else ""
    name = name or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    return ModelShape(name, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, 4, experts, active)


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json; of a multimodal model, its decoder's. Raises BadInput."""
    config = read_json(path, what="configuration of a model", made_by="hf download MODEL config.json", infinite=True)
    if not isinstance(config, dict):
        raise _bad(path, f"holds a JSON {type(config).__name__}, not an object")
    nested = config.get("text_config")
    if "hidden_size" not in config and isinstance(nested, dict):
        return {**config, **nested}
    return config


def _bad(path: Path, found: str) -> BadInput:
    remedy = "Give the HuggingFace config.json of a decoder-only model, or name a preset."
    return BadInput(found, where=str(path), remedy=remedy)
