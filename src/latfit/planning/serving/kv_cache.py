"""Compute the number of KV blocks of an engine from GPU memory.

It follows vLLM: what utilisation, weights and other allocations leave, divided by the bytes of a block.
Activations and other allocations are estimated with a range unless given. Formula and accuracy:
docs/theory/planning.md, "KV blocks".
"""

from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Any

from latfit.errors import WrongUsage
from latfit.planning.serving.model_size import (
    AUTO,
    Config,
    has_sliding_window,
    kv_bytes_per_token,
    number_bytes,
    step_widths,
    weight_bytes,
)
from latfit.profiling import read_config
from latfit.units import format_bytes, format_percent

GIB = 2**30
UTILISATION = 0.9
"""vLLM's default of `gpu_memory_utilization` for most of its versions; the newest take 0.92."""
BLOCK_SIZE = 16
SAMPLING_BYTES = 16


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one engine.

    Attributes
    ----------
    blocks
        As the engine reports them at its start, its null block included.
    how
        Source of the number, as a sentence.
    bytes_per_token
        On one GPU; None if unknown.
    least, most
        Blocks at the ends of the estimated range; None if the number is exact.
    """

    blocks: int
    block_size: int
    how: str
    bytes_per_token: int | None = None
    least: int | None = None
    most: int | None = None

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens}


@dataclass(frozen=True)
class Served:
    """How an engine serves a model. dtype: of its weights.  kv_dtype: of its KV cache, None for the model's."""

    dtype: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: int = 1
    block_size: int = BLOCK_SIZE
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256

    @property
    def cache_dtype(self) -> str | None:
        """The KV cache's number type: the model's, not that of quantised weights."""
        plain = self.dtype not in AUTO and number_bytes(self.dtype) >= 2
        return self.dtype if self.kv_dtype in AUTO and plain else self.kv_dtype


@dataclass(frozen=True)
class GpuMemory:
    """Memory in bytes.

    Attributes
    ----------
    gpu
        Of one GPU, as nvidia-smi reports it (an "80 GB" GPU has some 79.6 GiB).
    weights
        Of the whole model; None computes it from the config.
    other
        Activations, CUDA graphs and all else on one GPU; None estimates it.
    kv
        For the KV cache of one GPU, instead of all others.
    """

    gpu: float | None = None
    utilisation: float = UTILISATION
    weights: float | None = None
    other: float | None = None
    kv: float | None = None

    def __post_init__(self) -> None:
        if self.kv is not None and (self.gpu, self.weights, self.other) != (None, None, None):
            raise WrongUsage(
                "memory of the KV cache is given beside that from which it would be computed",
                where="KV cache",
                remedy="Give one of them.",
            )
        if not 0 < self.utilisation <= 1:
            raise WrongUsage(
                f"a share of {self.utilisation:g}",
                where="--gpu-memory-utilization",
                remedy="Give one above 0, up to 1.",
            )


def kv_cache_of(config: Config, memory: GpuMemory, served: Served | None = None) -> KvCache:
    """Compute the KV cache that fits in a GPU's memory.

    Raises
    ------
    BadInput
        If the config lacks a size.
    WrongUsage
        If no memory is given or none is left.
    """
    served = served or Served()
    per_token = kv_bytes_per_token(config, served.cache_dtype, served.tensor_parallel)
    block_bytes = per_token * served.block_size
    window = "; sliding windows counted as full attention" if has_sliding_window(config) else ""
    token = f"{per_token:,} bytes per token, {served.block_size} tokens per block{window}"
    if memory.kv is not None:
        blocks = _blocks(memory.kv, block_bytes, f"{format_bytes(memory.kv)} of KV cache hold no block")
        return KvCache(
            blocks, served.block_size, f"computed from {format_bytes(memory.kv)} of KV cache: {token}", per_token
        )
    whole = weight_bytes(config, served.dtype) if memory.weights is None else memory.weights
    free = _usable(memory) - whole / served.tensor_parallel
    low, other, high = other_bytes(config, served) if memory.other is None else (memory.other,) * 3
    parts = (
        f"{format_bytes(memory.gpu or 0)} of GPU memory at {format_percent(100 * memory.utilisation)}, less"
        f" {format_bytes(whole / served.tensor_parallel)} of weights and {format_bytes(other)} of all else"
    )
    blocks = _blocks(free - other, block_bytes, f"{parts}, leaves no KV block")
    if memory.other is not None:
        return KvCache(blocks, served.block_size, f"computed from {parts}: {token}", per_token)
    least, most = (max(0, floor((free - all_else) / block_bytes)) for all_else in (high, low))
    how = f"computed from {parts} (estimated, {format_bytes(low)} to {format_bytes(high)}): {token}"
    return KvCache(blocks, served.block_size, how, per_token, least, most)


def _blocks(free: float, block_bytes: float, found: str) -> int:
    blocks = floor(free / block_bytes)
    if blocks < 2:
        raise WrongUsage(
            found,
            where="KV cache",
            remedy="Give more memory, more GPUs (tensor parallel), a higher utilisation, or smaller weights.",
        )
    return blocks


def _usable(memory: GpuMemory) -> float:
    """Return the bytes of a GPU that the engine may use."""
    if memory.gpu is None:
        raise WrongUsage(
            "neither GPU memory nor that of the KV cache is given",
            where="KV cache",
            remedy="Give --gpu-memory 24564MiB or --kv-memory 4GiB, or the --kv-blocks that the engine's log says.",
        )
    return memory.gpu * memory.utilisation


def other_bytes(config: Config, served: Served) -> tuple[float, float, float]:
    """Estimate (low, estimate, high) the bytes on a GPU besides weights and KV cache: docs/theory/planning.md."""
    hidden, intermediate = step_widths(config)
    activations = 2 * served.max_num_batched_tokens * (4 * hidden + 3 * intermediate / served.tensor_parallel)
    sampling = SAMPLING_BYTES * served.max_num_seqs * int(config.get("vocab_size") or 0)
    together, shared = activations + sampling, served.tensor_parallel > 1
    return (
        max(activations, sampling) + 0.1 * GIB,
        together + (1.5 if shared else 0.5) * GIB,
        2 * together + (4 if shared else 2) * GIB,
    )


def model_config(path: Path) -> Config:
    """Read a config.json, or the one in a folder. Raises BadInput."""
    return read_config(path / "config.json" if path.is_dir() else path)
