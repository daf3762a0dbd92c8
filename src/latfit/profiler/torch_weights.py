"""Weights of a decoder in PyTorch, and the products with them that each device and precision runs fastest.

On a CPU, bfloat16 and float32 weights are packed once for oneDNN (a plain `linear` repacks them at every step: 2.3
times slower at one token, measured on AVX-512-BF16). 8-bit weights hold one scale a column; activations get one scale
a product, found at run time, and are stored as unsigned bytes around 128, the only kind that oneDNN has VNNI and AMX
kernels for beside 8-bit weights. On a GPU it is `linear`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from latfit.profiler.numpy_decoder import DecoderWeights
from latfit.profiler.workload import ModelShape

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


def torch_weights(weights: DecoderWeights, device: str, precision: str) -> TorchWeights:
    """The weights of the NumPy decoder in PyTorch."""
    import torch

    dtype = activation_dtype(precision)

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(array.copy()).to(device=device, dtype=dtype).contiguous()

    def product(array: Any) -> Linear:
        return linear(tensor(array.T), precision)

    def experts(gate_up: Any, down: Any, routed: bool) -> Sequence[tuple[Any, Any]]:
        return list(zip(gate_up, down, strict=True)) if routed else [(gate_up, down)]

    layers = tuple(
        TorchLayer(
            attention_norm=tensor(layer.attention_norm),
            qkv=product(layer.qkv),
            out=product(layer.out),
            mlp_norm=tensor(layer.mlp_norm),
            mlps=tuple(
                (product(up), product(down))
                for up, down in experts(layer.gate_up, layer.down, layer.router is not None)
            ),
            router=None if layer.router is None else product(layer.router),
        )
        for layer in weights.layers
    )
    embedding = tensor(weights.embedding)
    final_norm = tensor(weights.final_norm)
    return TorchWeights(weights.shape, layers, final_norm, embedding, linear(embedding, precision), dtype, device)


def activation_dtype(precision: str) -> Any:
    """Type of everything but the weights: 8-bit weights meet bfloat16."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.bfloat16}[precision]
