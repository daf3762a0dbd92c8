"""How many KV blocks an engine has: from its log, as given, or from memory.

vLLM divides what is left of a GPU's memory by the bytes of a block, and rounds down:

    blocks = floor(memory for the KV cache / (block size · bytes per token)),
    memory for the KV cache = GPU memory · utilisation − weights / tp − all else

(`get_num_blocks` in v1/core/kv_cache_utils.py, `determine_available_memory` in v1/worker/gpu_worker.py). Where the
memory for the KV cache is given itself (`--kv-cache-memory-bytes`, VLLM_CPU_KVCACHE_SPACE), the first line is exact.

**All else** is what vLLM measures by running a step of `max_num_batched_tokens` tokens before it divides: activations,
the sampler's copies of the logits, CUDA's context and communication buffers, in newer versions the CUDA graphs too.
That depends on version, attention kernels and driver, and only a log tells it. The estimate here is

    activations = max_num_batched_tokens · (4 · hidden + 3 · intermediate / tp) · 2 bytes,
    sampling = max_num_seqs · vocabulary · 16 bytes (four copies in 32 bits),
    all else = activations + sampling + 0.5 GiB, and 1 GiB more where GPUs communicate,

with a range from max(activations, sampling) + 0.1 GiB to 2 (activations + sampling) + 2 GiB, 4 GiB where GPUs
communicate. The range was drawn around five published starts of language models of 0.5 to 8 billion parameters, where
all else took 0.7 to 4.8 GiB and the estimated blocks are off by 4 % at most; it promises nothing. A model that sees
images can need ten times as much. On a GPU that the weights nearly fill, all else decides: give what a log says of it.
"""

from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Any

from latfit.errors import BadInput, WrongUsage
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
from latfit.simulation import known_settings
from latfit.trace import engine_facts, open_source, start_facts
from latfit.units import format_bytes, format_percent

GIB = 2**30
UTILISATION = 0.9
"""vLLM's default of `gpu_memory_utilization` for most of its versions; the newest take 0.92."""
BLOCK_SIZE = 16
SAMPLING_BYTES = 16


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one engine.

    blocks: as the engine resolves them at its start, its null block included.  how: where the number comes from, a
    sentence.  bytes_per_token: on one GPU, None where nobody said.  least, most: blocks within the range of what is not
    known beforehand; None where the number is exact.
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
    """How an engine runs a model. dtype: of its weights.  kv_dtype: of its KV cache; None is the model's own."""

    dtype: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: int = 1
    block_size: int = BLOCK_SIZE
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256

    @property
    def cache_dtype(self) -> str | None:
        """The KV cache follows the model's numbers, not those that its weights are squeezed into."""
        plain = self.dtype not in AUTO and number_bytes(self.dtype) >= 2
        return self.dtype if self.kv_dtype in AUTO and plain else self.kv_dtype


@dataclass(frozen=True)
class GpuMemory:
    """Memory in bytes. gpu: of one GPU, as nvidia-smi or the engine says it (one sold as 80 GB has some 79.6 GiB).
    weights: of the whole model, counted from its config where None.  other: activations, graphs and all else on one
    GPU, estimated where None.  kv: for the KV cache of one GPU, in place of all others."""

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


def kv_cache_given(blocks: int, block_size: int = BLOCK_SIZE) -> KvCache:
    """A KV cache of a size that somebody gave."""
    return KvCache(blocks, block_size, "KV blocks as given")


def kv_cache_in_log(log: str | Path, block_size: int | None = None) -> KvCache:
    """The KV cache that a vLLM log names at the engine's start; the log need not hold steps.

    block_size: tokens of a block, for the logs that do not say; vLLM's default where it is None. Raises BadInput where
    no line tells the size.
    """
    source = open_source(log)
    facts = engine_facts([(source.name, start_facts(source))])
    known = known_settings(facts, block_size)
    if "kv_blocks" not in known.values:
        raise BadInput(
            "no line tells the size of the KV cache",
            where=source.name,
            remedy="Give the log from the engine's start on (`KV cache size: … tokens`), or give --kv-blocks.",
        )
    blocks, size = known.values["kv_blocks"], known.values["block_size"]
    tokens = facts.values.get("kv_capacity_tokens")
    said = f"{blocks:,} KV blocks" if tokens is None else f"a KV cache of {tokens:,} tokens"
    who = known.origin["block_size"] if block_size is None else "given"
    return KvCache(blocks, size, f"{source.name} says {said}; {size} tokens per block ({who})")


def kv_cache_of(config: Config, memory: GpuMemory, served: Served | None = None) -> KvCache:
    """The KV cache that an engine makes of a GPU's memory.

    Raises BadInput where the config tells too little, WrongUsage where no memory is left or none was given.
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
    """Bytes of a GPU that the engine may use."""
    if memory.gpu is None:
        raise WrongUsage(
            "neither GPU memory nor that of the KV cache is given",
            where="KV cache",
            remedy="Give --gpu-memory 24564MiB or --kv-memory 4GiB, or the --kv-blocks that the engine's log says.",
        )
    return memory.gpu * memory.utilisation


def other_bytes(config: Config, served: Served) -> tuple[float, float, float]:
    """(least, estimate, most) of what a GPU holds beside weights and KV cache, in bytes: see the module's head."""
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
    """The config.json at `path`, or in the folder there. Raises BadInput."""
    return read_config(path / "config.json" if path.is_dir() else path)
