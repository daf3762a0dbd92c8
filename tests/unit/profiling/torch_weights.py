"""The NumPy decoder's weights in PyTorch, so that both can compute the same step."""

from collections.abc import Sequence
from typing import Any

from latfit.profiling.devices.numpy_step import DecoderWeights
from latfit.profiling.devices.torch_step import Linear, Tensor, TorchLayer, TorchWeights, activation_dtype, linear


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
