"""How many layers a model has, for tables that measure one layer and leave the number out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A published model: its name, layers, and the sizes by which a table of one layer can be told."""

    name: str
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int


KNOWN_MODELS: tuple[ModelShape, ...] = (
    ModelShape("Llama-2-7b", 32, 4096, 11008, 32, 32, 32000),
    ModelShape("Llama-2-13b", 40, 5120, 13824, 40, 40, 32000),
    ModelShape("Llama-2-70b", 80, 8192, 28672, 64, 8, 32000),
    ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128256),
    ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256),
    ModelShape("Llama-3-70B", 80, 8192, 28672, 64, 8, 128256),
    ModelShape("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128256),
    ModelShape("CodeLlama-34b", 48, 8192, 22016, 64, 8, 32000),
    ModelShape("internlm-20b", 60, 5120, 13824, 40, 40, 103168),
    ModelShape("internlm2-20b", 48, 6144, 16384, 48, 8, 92544),
    ModelShape("phi-2", 32, 2560, 10240, 32, 32, 51200),
    ModelShape("Qwen-72B", 80, 8192, 24576, 64, 64, 152064),
    ModelShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 151936),
    ModelShape("Qwen3-32B", 64, 5120, 25600, 64, 8, 151936),
)


def model_of_shape(sizes: tuple[float, float, float, float], vocabulary: float) -> ModelShape | None:
    """The model of these (embedding, feed-forward, heads, KV heads); the vocabulary, often padded, parts two of one
    shape.
    """
    fitting = [m for m in KNOWN_MODELS if (m.embedding, m.feed_forward, m.heads, m.kv_heads) == sizes]
    return min(fitting, key=lambda m: abs(m.vocabulary - vocabulary), default=None)


def model_of_name(name: str) -> ModelShape | None:
    """The model whose name the last part of `name` starts with (`meta-llama/Llama-3.1-8B-Instruct`)."""
    plain = name.rpartition("/")[2].casefold().removeprefix("meta-")
    fitting = [m for m in KNOWN_MODELS if plain.startswith(m.name.casefold())]
    return max(fitting, key=lambda m: len(m.name), default=None)
