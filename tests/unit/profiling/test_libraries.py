"""OpenVINO and PyTorch compute the same step as the NumPy decoder, which is tested against the definition.

Each library gets the same weights, the same tokens and the same cache, and must give the same logits: in float32 to
rounding, in the narrow types to their own precision.
"""

import itertools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from latfit.profiling.devices.decoder import KvCache, Weights, groups_of, make_cache
from latfit.profiling.devices.device import DeviceOutOfMemory, DeviceSettings
from latfit.profiling.devices.numpy_device import NumpyStep, random_weights
from latfit.profiling.host.isa import cpu_flags
from latfit.profiling.shapes import PARTS, ModelShape, Part, StepShape
from tests.unit.profiling.decoder_reference import convert

needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed (latfit[amx])")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed (latfit[torch])")

DENSE = ModelShape("small", 64, 2, 4, 2, 16, 96, 128)
MIXTURE = ModelShape("small-moe", 64, 2, 4, 2, 16, 48, 128, experts=4, active_experts=2)
CELLS = (
    StepShape(1, 7),
    StepShape(5, 16),
    StepShape(prefill=(9,)),
    StepShape(prefill=(6, 6), history=(11, 11)),
    StepShape(3, 12, (5,), (4,)),
)
TOLERANCE = {"fp32": 2e-4, "bf16": 0.04, "int8": 0.08}
"""Root mean square error over that of the logits: bfloat16 keeps 8 bits, so 2^-9 a rounding, of which some tens add up
along two layers; 8-bit weights and activations round to 1/254 of the largest number of a group."""


def caches(cell: StepShape, shape: ModelShape) -> KvCache:
    """Random numbers in the cached places, NaN where the step writes."""
    rng = np.random.default_rng(3)
    found = make_cache(shape, cell, lambda size: rng.standard_normal(size).astype(np.float32))
    for group, pair in zip(groups_of(cell), found, strict=True):
        for half in pair:
            half[:, :, :, group.cached :] = np.nan
    return found


def expected(weights: Weights, cell: StepShape, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = NumpyStep(weights, cell, caches(cell, weights.shape)).run(tokens)
    return found


def agree(found: Any, wanted: Any, precision: str) -> None:
    error = np.asarray(found, np.float64) - wanted
    assert np.sqrt(np.mean(error**2)) <= TOLERANCE[precision] * np.sqrt(np.mean(np.square(wanted)))


@needs_openvino
class TestOpenVino:
    def step(self, shape: ModelShape, cell: StepShape, precision: str) -> tuple[Any, NDArray[np.float32]]:
        from latfit.profiling.devices.openvino_device import CACHE_TYPE, OpenVinoDevice, stored

        device = OpenVinoDevice(shape, DeviceSettings(precision, threads=1, seed=5))
        device.prepare(cell)
        for group, pair in zip(groups_of(cell), caches(cell, shape), strict=True):
            kind = "decode" if group.tokens == 1 else "prefill"
            for half, array in zip(("keys", "values"), pair, strict=True):
                for layer in range(shape.layers):
                    cached = stored(array[layer][:, :, : group.cached], CACHE_TYPE[precision])
                    device._request.set_tensor(f"{kind}_{half}_{layer}", cached)
        assert device.step_ms() > 0
        tokens = np.array(device._inputs[0].data)
        return device.output(), expected(random_weights(shape, 5), cell, tokens)

    @pytest.mark.parametrize("cell", CELLS, ids=str)
    @pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=lambda shape: shape.name)
    def test_computes_the_same_step(self, shape: ModelShape, cell: StepShape) -> None:
        agree(*self.step(shape, cell, "fp32"), "fp32")

    @pytest.mark.parametrize("precision", ["bf16", "int8"])
    def test_narrow_types_are_close(self, precision: str) -> None:
        if "avx512_bf16" not in cpu_flags() and "amx_bf16" not in cpu_flags():
            pytest.skip("this CPU has no bfloat16 arithmetic")
        agree(*self.step(DENSE, CELLS[-1], precision), precision)

    @pytest.mark.parametrize("part", PARTS)
    def test_parts_run_by_themselves(self, part: Part) -> None:
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        device = OpenVinoDevice(DENSE, DeviceSettings("fp32", threads=1, part=part))
        for cell in CELLS:
            device.prepare(cell)
            assert device.step_ms() > 0
        device.close()

    def test_a_cell_beyond_memory_is_a_limit(self) -> None:
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        device = OpenVinoDevice(DENSE, DeviceSettings("fp32", threads=1))
        with pytest.raises(DeviceOutOfMemory, match="GiB"):
            device.prepare(StepShape(2**20, 2**20))
        with pytest.raises(DeviceOutOfMemory, match="one length"):
            device.prepare(StepShape(prefill=(4, 5)))
        device.prepare(StepShape(1, 4))
        assert device.step_ms() > 0


@needs_torch
class TestTorch:
    def step(self, shape: ModelShape, cell: StepShape, precision: str) -> tuple[Any, NDArray[np.float32]]:
        import torch

        from latfit.profiling.devices.torch_device import TorchStep, activation_dtype, linear

        weights, tokens = random_weights(shape, 5), np.random.default_rng(1).integers(0, shape.vocab, cell.S)

        def tensor(array: Any) -> Any:
            return torch.from_numpy(array.copy()).to(activation_dtype(precision))

        cache = [(tensor(keys), tensor(values)) for keys, values in caches(cell, shape)]
        with torch.inference_mode():
            loaded = convert(weights, tensor, lambda array: linear(tensor(array), precision))
            found = TorchStep(loaded, cell, cache).run(torch.from_numpy(tokens)).float().numpy()
        return found, expected(weights, cell, tokens)

    @pytest.mark.parametrize("cell", CELLS, ids=str)
    @pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=lambda shape: shape.name)
    def test_computes_the_same_step(self, shape: ModelShape, cell: StepShape) -> None:
        agree(*self.step(shape, cell, "fp32"), "fp32")

    @pytest.mark.parametrize("precision", ["bf16", "int8"])
    def test_narrow_types_are_close(self, precision: str) -> None:
        agree(*self.step(DENSE, CELLS[-1], precision), precision)

    @pytest.mark.parametrize(("part", "precision"), list(itertools.product(PARTS, ("fp32", "bf16", "int8"))))
    def test_parts_run_by_themselves(self, part: Part, precision: str) -> None:
        from latfit.profiling.devices.torch_device import TorchDevice

        device = TorchDevice(DENSE, DeviceSettings(precision, threads=1, part=part))
        for cell in CELLS:
            device.prepare(cell)
            assert device.step_ms() > 0
        device.close()

    def test_a_cell_beyond_memory_is_a_limit(self) -> None:
        from latfit.profiling.devices.torch_device import TorchDevice

        device = TorchDevice(DENSE, DeviceSettings("fp32", threads=1))
        with pytest.raises(DeviceOutOfMemory, match="GiB"):
            device.prepare(StepShape(2**20, 2**20))
        device.close()
