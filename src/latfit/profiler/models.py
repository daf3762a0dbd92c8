"""Models by name: presets from 0.01 to 8 billion parameters, and the shape in a HuggingFace config.json.

Only sizes are read; weights are random, so nothing is downloaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latfit.errors import BadInput, WrongUsage
from latfit.files import unreadable
from latfit.profiler.workload import ModelShape

# The sizes of `tiny` put 55 MB of weights behind a step: more than most caches hold, so that a small step
# waits for memory and a large one for arithmetic, and still only milliseconds on two cores. The others are
# public models.
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
    """The preset of that name, or the shape in a config.json (or in the folder that holds one), cut to
    `layers`.

    Raises BadInput for a file that is missing or is no such config, WrongUsage for a number of layers below
    1.
    """
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
        raise BadInput(
            f"no preset and no file is called {name!r}",
            where="--model",
            remedy=f"Name a config.json, or one of {', '.join(PRESETS)}.",
        )
    return shape if layers is None else shape.with_layers(layers)


def from_config(path: Path) -> ModelShape:
    """The shape in a HuggingFace config.json; keys and values per layer default to one per head, as there.

    Raises BadInput where the file is missing, is not JSON, lacks a size, or describes what no device here
    computes.
    """
    config = _read_config(path)
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise _bad(path, f"{key} = {config[key]!r} means {what}, which cannot be measured yet")
    hidden, layers, heads, intermediate, vocab = (
        _size(config, key, path)
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
    )
    kv_heads = _size(config, "num_key_value_heads", path, default=heads)
    head_dim = _size(config, "head_dim", path, default=hidden // heads)
    if heads % kv_heads:
        raise _bad(path, f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")
    if head_dim < 2 or head_dim % 2:
        raise _bad(path, f"a head of {head_dim} numbers cannot be rotated by position; it must be even")
    experts, active = _experts(config, path)
    if experts:
        intermediate = _size(config, "moe_intermediate_size", path, default=intermediate)
    name = _config_name(config, path)
    sizes = (hidden, layers, heads, kv_heads, head_dim, intermediate, vocab)
    return ModelShape(name, *sizes, experts=experts, active_experts=active)


def _experts(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """(experts in a layer, those that a token passes); (0, 0) for a dense model."""
    key = next((key for key in _EXPERTS if config.get(key)), None)
    if key is None:
        return 0, 0
    experts = _size(config, key, path)
    active = _size(config, "num_experts_per_tok", path)
    if active > experts:
        raise _bad(path, f"num_experts_per_tok = {active} is more than {key} = {experts}")
    return (0, 0) if experts == 1 else (experts, active)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"not JSON ({error})") from None
    if not isinstance(config, dict):
        raise _bad(path, f"holds a JSON {type(config).__name__}, not an object")
    nested = config.get("text_config")
    if "hidden_size" not in config and isinstance(nested, dict):
        return {**config, **nested}
    return config


def _size(config: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise _bad(path, f"has no {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(path, f"{key} = {value!r} is not a whole number above zero")
    return value


def _config_name(config: Mapping[str, Any], path: Path) -> str:
    named = config.get("_name_or_path")
    if isinstance(named, str) and named.strip("/ "):
        return named.strip("/ ").rsplit("/", 1)[-1]
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _bad(path: Path, found: str) -> BadInput:
    return BadInput(
        found,
        where=str(path),
        remedy="Give the HuggingFace config.json of a decoder-only model, or name a preset.",
    )
