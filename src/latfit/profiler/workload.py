"""What a profiled step computes: the shape of the model, and the shape of one step (a cell of the grid).

A step runs all its tokens through the layers together. Decode requests bring one token each and read their
cached context; prefill requests bring a chunk of prompt tokens, which may follow a part of the prompt that is
cached already. The embedding and the language-model head are one matrix here, so the weights of a layer are
hidden x (heads + 2 kv_heads) x head_dim for Q, K, V, heads x head_dim x hidden for the output projection, and
3 x hidden x intermediate for the gated MLP. With a mixture of experts, a router of hidden x experts sends every
token to the `active_experts` gated MLPs that it scores highest; all of them are stored, so a step's work counts the
active ones and its memory all. Floating-point operations count a multiply and an add as two.
"""

from dataclasses import dataclass, replace
from typing import Literal

from latfit.errors import WrongUsage

Phase = Literal["decode", "prefill", "mixed"]

Part = Literal["step", "gemm", "attention"]
"""What is executed of a step: all of it, only the products with weights, or only attention over the cache."""
PARTS: tuple[Part, ...] = ("step", "gemm", "attention")

GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer by its sizes; weights are random, so the sizes are all that a step's latency
    needs."""

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
        """Columns of the query, and rows of the output projection."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that multiply a token; of experts, the active ones."""
        return self._layer(self.active_experts)

    @property
    def stored_layer_parameters(self) -> int:
        """Weights of one layer in memory; of experts, all."""
        return self._layer(self.experts)

    def _layer(self, experts: int) -> int:
        mlps = experts if self.experts else 1
        return self.hidden * (self.qkv_width + self.query_width + 3 * mlps * self.intermediate + self.experts)

    @property
    def parameters(self) -> int:
        """All weights, with the embedding counted once."""
        return self.layers * (self.stored_layer_parameters + 2 * self.hidden) + self.hidden * (self.vocab + 1)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys and values that `tokens` tokens keep in the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.activation_bytes * tokens

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number outside the weights: 8-bit weights meet 16-bit activations and caches."""
        return max(2, self.dtype_bytes)

    def with_layers(self, layers: int) -> "ModelShape":
        """The same model cut or stretched to `layers` layers, named after what it is."""
        if layers == self.layers:
            return self
        return replace(self, layers=layers, name=f"{self.name}-{layers}layers")


@dataclass(frozen=True)
class StepShape:
    """One cell of the grid: `decode_requests` requests with `context` cached tokens each, and a chunk of
    prompt tokens for each prefill request. `history` holds the cached tokens before each chunk; empty means
    none."""

    decode_requests: int = 0
    context: int = 0
    prefill: tuple[int, ...] = ()
    history: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.history:
            object.__setattr__(self, "history", (0,) * len(self.prefill))
        if len(self.history) != len(self.prefill):
            raise ValueError(f"{len(self.history)} histories for {len(self.prefill)} chunks")
        if min(self.prefill, default=1) < 1 or min(self.decode_requests, self.context, *self.history, 0) < 0:
            raise ValueError(f"counts of tokens and requests must not be negative, chunks at least 1: {self}")
        if not self.decode_requests and not self.prefill:
            raise ValueError("a step needs at least one request")

    @property
    def B(self) -> int:
        """Requests in the step."""
        return self.decode_requests + len(self.prefill)

    @property
    def S(self) -> int:
        """Tokens that the step computes."""
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
        """Cached tokens that the prefill chunks read."""
        return sum(self.history)

    @property
    def context_tokens(self) -> int:
        """Cached tokens that the whole step reads."""
        return self.decode_requests * self.context + self.prefill_context_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens in the cache once the step is done."""
        return self.context_tokens + self.S

    def __str__(self) -> str:
        context = f", {self.context_tokens} cached tokens" if self.context_tokens else ""
        return f"B={self.B} S={self.S} ({self.phase}{context})"


def step_flops(shape: ModelShape, cell: StepShape) -> float:
    """Floating-point operations of one step: projections and MLP of every token, attention, head on last
    tokens."""
    pairs = float(cell.decode_requests * (cell.context + 1))
    pairs += sum(n * (before + (n + 1) / 2) for n, before in zip(cell.prefill, cell.history, strict=True))
    attention = 4.0 * shape.query_width * pairs * shape.layers
    return 2.0 * cell.S * shape.layers * shape.layer_parameters + attention + 2.0 * cell.B * shape.hidden * shape.vocab


def step_bytes(shape: ModelShape, cell: StepShape) -> int:
    """Memory that one step needs beside the weights: cache, and activations of the widest layer."""
    widths = 3 * shape.hidden + 2 * shape.qkv_width + shape.query_width + 3 * shape.intermediate
    activations = (cell.S * widths + cell.B * shape.vocab) * shape.activation_bytes
    return shape.cache_bytes(cell.cache_tokens) + activations


def check_fits(shape: ModelShape, free_bytes: int | None) -> None:
    """Raise WrongUsage where the weights take more than nine tenths of the memory that is free."""
    if free_bytes is None or shape.weight_bytes <= 0.9 * free_bytes:
        return
    per_layer = shape.stored_layer_parameters * shape.dtype_bytes
    room = 0.9 * free_bytes - (shape.weight_bytes - shape.layers * per_layer)
    layers = int(room // per_layer)
    remedy = f"Measure fewer of its layers (--layers {layers})" if layers >= 1 else "Choose a smaller --model"
    raise WrongUsage(
        f"its weights take {shape.weight_bytes / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB are free",
        where=f"model {shape.name}",
        remedy=f"{remedy}.",
    )
