"""One step of a decoder layer stack in PyTorch, on a CPU or on a GPU; the arithmetic is that of `numpy_step`.

Attention goes through `scaled_dot_product_attention`, which runs a fused kernel where there is one. A decode request
has one query for each head; the heads that share a key head are put side by side as if they were so many positions of
one head, none of which is masked, so that the cache is read once. A prefill chunk after h cached tokens attends with a
causal mask that ends at the lower right corner.

Each device and precision has the product with weights that runs fastest. On a CPU, bfloat16 and float32 weights are
packed once for oneDNN (a plain `linear` repacks them at every step: 2.3 times slower at one token, measured on
AVX-512-BF16). 8-bit weights hold one scale a column; activations get one scale a product, found at run time, and are
stored as unsigned bytes around 128, the only kind that oneDNN has VNNI and AMX kernels for beside 8-bit weights. On a
GPU it is `linear`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from latfit.profiling.shapes import ModelShape, Part, StepShape

Tensor = Any
Linear = Callable[[Tensor], Tensor]
"""x (S, in) to (S, out)."""


@dataclass(frozen=True)
class TorchLayer:
    """One layer. mlps: gate_up and down of each expert, or of the one dense MLP; router is None there."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    mlps: tuple[tuple[Linear, Linear], ...]
    router: Linear | None


@dataclass(frozen=True)
class TorchWeights:
    """All weights; `head` multiplies by the embedding."""

    shape: ModelShape
    layers: tuple[TorchLayer, ...]
    final_norm: Tensor
    embedding: Tensor
    head: Linear
    dtype: Any
    device: str


def linear(weight: Tensor, precision: str) -> Linear:
    """The product with `weight` (out, in), packed for where it lies. precision: bf16, fp16, fp32 or int8."""
    import torch

    if weight.device.type != "cpu":
        return lambda x: torch.nn.functional.linear(x, weight)
    if precision == "int8":
        return _int8_linear(weight)
    if precision == "bf16" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return lambda x: torch.nn.functional.linear(x, weight)


def _int8_linear(weight: Tensor) -> Linear:
    import torch

    scales = weight.float().abs().amax(1) / 127
    rounded = (weight.float() / scales[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(rounded, None)
    zeros = torch.zeros(len(scales), dtype=torch.int32)

    def multiply(x: Tensor) -> Tensor:
        scale = torch.clamp(x.abs().amax().float() / 127, min=1e-12)
        stored = torch.clamp((x.float() / scale).round() + 128, 0, 255).to(torch.uint8)
        arguments: tuple[Any, ...] = (
            stored,
            float(scale),
            128,
            packed,
            scales,
            zeros,
            None,
            1.0,
            0,
            x.dtype,
            "none",
            [],
            "",
        )
        return torch.ops.onednn.qlinear_pointwise(*arguments)

    return multiply


def random_torch_weights(shape: ModelShape, device: str, precision: str, seed: int) -> TorchWeights:
    """Random weights made where they are used, one matrix at a time; torch raises where memory ends."""
    import torch

    dtype = activation_dtype(precision)
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.empty(columns, rows, dtype=dtype, device=device)
        return made.normal_(0, rows**-0.5, generator=generator)

    def norm() -> Tensor:
        return torch.empty(shape.hidden, dtype=dtype, device=device).uniform_(0.8, 1.2, generator=generator)

    def layer() -> TorchLayer:
        mlps = tuple(
            (
                linear(matrix(shape.hidden, 2 * shape.intermediate), precision),
                linear(matrix(shape.intermediate, shape.hidden), precision),
            )
            for _ in range(shape.experts or 1)
        )
        return TorchLayer(
            attention_norm=norm(),
            qkv=linear(matrix(shape.hidden, shape.qkv_width), precision),
            out=linear(matrix(shape.query_width, shape.hidden), precision),
            mlp_norm=norm(),
            mlps=mlps,
            router=linear(matrix(shape.hidden, shape.experts), precision) if shape.experts else None,
        )

    layers = tuple(layer() for _ in range(shape.layers))
    embedding = torch.empty(shape.vocab, shape.hidden, dtype=dtype, device=device).normal_(generator=generator)
    return TorchWeights(shape, layers, norm(), embedding, linear(embedding, precision), dtype, device)


def activation_dtype(precision: str) -> Any:
    """Type of everything but the weights: 8-bit weights meet bfloat16."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.bfloat16}[precision]


EPS = 1e-6


@dataclass(frozen=True)
class TorchCache:
    """Keys and values of decode requests (layers, requests, kv_heads, room, head_dim), and a pair of (layers, 1,
    kv_heads, room, head_dim) for each prefill request."""

    decode_keys: Tensor
    decode_values: Tensor
    prefill: tuple[tuple[Tensor, Tensor], ...] = ()


def random_cache(shape: ModelShape, cell: StepShape, dtype: Any, device: str) -> TorchCache:
    """A cache with random numbers in every slot that the step reads."""
    import torch

    def pair(*size: int) -> tuple[Tensor, Tensor]:
        full = (shape.layers, *size[:1], shape.kv_heads, *size[1:], shape.head_dim)
        return (
            torch.empty(full, dtype=dtype, device=device).normal_(),
            torch.empty(full, dtype=dtype, device=device).normal_(),
        )

    chunks = tuple(pair(1, before + n) for n, before in zip(cell.prefill, cell.history, strict=True))
    return TorchCache(*pair(cell.decode_requests, cell.context + 1), prefill=chunks)


class TorchStep:
    """The step of one cell over one cache. `tokens` (S,) is read at every run, so new ones may be copied into it."""

    def __init__(self, weights: TorchWeights, cell: StepShape, cache: TorchCache, tokens: Tensor) -> None:
        import torch

        self.tokens = tokens
        self._weights, self._cell, self._cache = weights, cell, cache
        shape, place = weights.shape, {"device": weights.device, "dtype": weights.dtype}
        stops = np.cumsum([cell.decode_requests, *cell.prefill]).tolist()
        self._chunks = [slice(start, stop) for start, stop in pairwise(stops)]
        last = [*range(cell.decode_requests), *(stop - 1 for stop in stops[1:])]
        self._last_rows = torch.tensor(last, device=weights.device)
        cosine, sine = _rotation(cell, shape.head_dim)
        self._cosine, self._sine = torch.from_numpy(cosine).to(**place), torch.from_numpy(sine).to(**place)
        self._masks = [_mask(n, before, weights.device) for n, before in zip(cell.prefill, cell.history, strict=True)]
        self._x = torch.randn(cell.S, shape.hidden, **place)
        self._heads = torch.randn(cell.S, shape.heads + 2 * shape.kv_heads, shape.head_dim, **place)
        self._attended = torch.randn(cell.S, shape.query_width, **place)

    def run(self) -> Tensor:
        """Logits (B, vocab) of each request's last token; decode requests first, then the chunks in order."""
        from torch.nn import functional

        weights, width = self._weights, (self._weights.shape.hidden,)
        x = functional.embedding(self.tokens, weights.embedding)
        for number, layer in enumerate(weights.layers):
            heads = layer.qkv(functional.rms_norm(x, width, layer.attention_norm, EPS))
            x = x + layer.out(self._attend(number, heads.view(self._heads.shape)))
            x = x + self._mlp(layer, functional.rms_norm(x, width, layer.mlp_norm, EPS))
        last = functional.rms_norm(x[self._last_rows], width, weights.final_norm, EPS)
        return weights.head(last)

    def part(self, part: Part) -> Tensor:
        """The whole step, or only its products with weights, or only its attention, on random numbers."""
        if part == "step":
            return self.run()
        found = self._x
        for number, layer in enumerate(self._weights.layers):
            if part == "attention":
                found = self._attend(number, self._heads)
                continue
            layer.qkv(self._x)
            layer.out(self._attended)
            found = self._mlp(layer, self._x)
        return found

    def _attend(self, layer: int, heads: Tensor) -> Tensor:
        import torch

        shape, cell, cache = self._weights.shape, self._cell, self._cache
        turned = _rotated(heads[:, : shape.heads + shape.kv_heads], self._cosine, self._sine)
        queries, keys = turned[:, : shape.heads], turned[:, shape.heads :]
        values = heads[:, shape.heads + shape.kv_heads :]
        parts = []
        if cell.decode_requests:
            rows = slice(0, cell.decode_requests)
            kept = (cache.decode_keys[layer], cache.decode_values[layer])
            parts.append(self._decode(queries[rows], keys[rows], values[rows], kept))
        for number, rows in enumerate(self._chunks):
            kept = (cache.prefill[number][0][layer], cache.prefill[number][1][layer])
            parts.append(self._prefill(number, queries[rows], (keys[rows], values[rows]), kept))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, queries: Tensor, keys: Tensor, values: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention

        shape, context = self._weights.shape, self._cell.context
        kept[0][:, :, context], kept[1][:, :, context] = keys, values
        grouped = queries.reshape(len(queries), shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        found = scaled_dot_product_attention(grouped, kept[0][:, :, : context + 1], kept[1][:, :, : context + 1])
        return found.reshape(len(queries), shape.query_width)

    def _prefill(self, number: int, queries: Tensor, new: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor]) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention

        shape, before, n = self._weights.shape, self._cell.history[number], self._cell.prefill[number]
        for cache, fresh in zip(kept, new, strict=True):
            cache[0, :, before : before + n] = fresh.transpose(0, 1)
        mask = self._masks[number]
        found = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            kept[0][:, :, : before + n],
            kept[1][:, :, : before + n],
            attn_mask=mask,
            is_causal=mask is None and n > 1,
            enable_gqa=shape.heads != shape.kv_heads,
        )
        return found[0].transpose(0, 1).reshape(n, shape.query_width)

    def _mlp(self, layer: TorchLayer, x: Tensor) -> Tensor:
        import torch

        if layer.router is None:
            return _gated(layer.mlps[0], x)
        scores, chosen = layer.router(x).float().topk(self._weights.shape.active_experts, dim=-1)
        shares = scores.softmax(-1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            rows, slot = torch.where(chosen == expert)
            out.index_add_(0, rows, _gated(layer.mlps[expert], x[rows]) * shares[rows, slot, None])
        return out


def _gated(mlp: tuple[Any, Any], x: Tensor) -> Tensor:
    from torch.nn.functional import silu

    gate, up = mlp[0](x).chunk(2, dim=-1)
    return mlp[1](silu(gate) * up)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    import torch

    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _rotation(cell: StepShape, head_dim: int) -> tuple[Any, Any]:
    from latfit.profiling.devices.numpy_step import positions, rotation

    return rotation(positions(cell), head_dim)


def _mask(tokens: int, history: int, device: str) -> Tensor | None:
    """None where the plain causal mask is meant, or where nothing is masked."""
    import torch

    if not history or tokens == 1:
        return None
    if device != "cpu":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(tokens, history + tokens)
    return torch.ones(tokens, history + tokens, dtype=torch.bool).tril(history)
