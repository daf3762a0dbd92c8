"""Compute the number of KV blocks of an engine from GPU memory.

It follows vLLM: what utilisation, weights and other allocations leave, divided by the bytes of a block.
Activations and other allocations are estimated with a range unless given. Formula and accuracy:
docs/theory/planning.md, "KV blocks".
"""

from dataclasses import dataclass
from math import floor
from pathlib import Path

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
UTILISATION = 0.9  # vLLM's default of `gpu_memory_utilization`; the newest versions take 0.92
BLOCK_SIZE = 16
SAMPLING_BYTES = 16


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one engine. blocks: as the engine reports them, its null block included. how: their source."""

    blocks: int
    block_size: int
    how: str


@dataclass(frozen=True)
class Served:
    """How an engine serves a model. kv_dtype: None for the model's."""

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
    """Bytes of one GPU, as nvidia-smi reports them, or of its KV cache (`kv`)."""

    gpu: float | None = None
    utilisation: float = UTILISATION
    kv: float | None = None

    def __post_init__(self) -> None:
        if self.kv is not None and self.gpu is not None:
            raise WrongUsage(
                "memory of the KV cache is given beside that from which it would be computed",
                where="KV cache",
                remedy="Give one of them.",
            )
        if not 0 < self.utilisation <= 1:
            raise WrongUsage(
                f"a share of {self.utilisation:g}",
                where="--set gpu_memory_utilization",
                remedy="Give one above 0, up to 1.",
            )


def kv_cache_of(config: Config, memory: GpuMemory, served: Served | None = None) -> KvCache:
    """Compute the KV cache that fits in a GPU's memory. Raises BadInput, and WrongUsage if no memory is left."""
    served = served or Served()
    per_token = kv_bytes_per_token(config, served.cache_dtype, served.tensor_parallel)
    window = "; sliding windows counted as full attention" if has_sliding_window(config) else ""
    if memory.kv is not None:
        free, parts, estimated = memory.kv, f"{format_bytes(memory.kv)} of KV cache", ""
    elif memory.gpu is None:
        raise WrongUsage(
            "neither GPU memory nor that of the KV cache is given",
            where="KV cache",
            remedy="Give --gpu-memory 24564MiB or --set kv_memory=4GiB, or the --kv-blocks that the engine's log says.",
        )
    else:
        weights = weight_bytes(config, served.dtype) / served.tensor_parallel
        low, other, high = other_bytes(config, served)
        free = memory.gpu * memory.utilisation - weights - other
        parts = (
            f"{format_bytes(memory.gpu)} of GPU memory at {format_percent(100 * memory.utilisation)}, less"
            f" {format_bytes(weights)} of weights and {format_bytes(other)} of all else"
        )
        estimated = f" (estimated, {format_bytes(low)} to {format_bytes(high)})"
    blocks = floor(free / (per_token * served.block_size))
    if blocks < 2:
        raise WrongUsage(
            f"{parts}: no KV block is left",
            where="KV cache",
            remedy="Give more memory, more GPUs (tensor parallel), a higher utilisation, or smaller weights.",
        )
    token = f"{per_token:,} bytes per token, {served.block_size} tokens per block{window}"
    return KvCache(blocks, served.block_size, f"computed from {parts}{estimated}: {token}")


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
