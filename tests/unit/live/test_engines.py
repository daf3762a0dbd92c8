"""Engines behind the router: what they give is what NumPy gives, and they see only the sizes they were made for."""

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from latfit.live import ProcessExecutor, Router, RouterOptions, ThreadExecutor
from latfit.live.engines import ByRows, openvino_run, torch_run
from latfit.live.executor import Run
from latfit.policies import Limits
from latfit.policies.policy import gpu_only

needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed (latfit[amx])")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed (latfit[torch])")

W = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
ROWS = np.random.default_rng(1).standard_normal((200, 6)).astype(np.float32)
LARGEST, BUCKETS = 8, (1, 4, 8)


def product(sizes: list[int]) -> Run:
    def compute(arrays: Any) -> Any:
        sizes.append(len(arrays[""]))
        return {"": arrays[""] @ W}

    return ByRows(compute)


def in_openvino(*more: str) -> Any:
    """An openvino.Model of x W, and of max(x, 0) under each name that is given."""
    import openvino as ov
    from openvino import opset14 as op

    x = op.parameter([-1, 6], ov.Type.f32, name="x")
    outputs = [op.result(op.matmul(x, op.constant(W), False, False))]
    for name in more:
        positive = op.relu(x)
        positive.output(0).tensor.set_names({name})
        outputs.append(op.result(positive))
    return ov.Model(outputs, [x], "product")


def through_openvino(sizes: list[int]) -> Run:
    run = openvino_run(in_openvino(), threads=1)

    def noted(inputs: list[Any]) -> Sequence[Any]:
        sizes.append(len(inputs))
        return run(inputs)

    return noted


def through_torch(sizes: list[int]) -> Run:
    import torch

    weights = torch.from_numpy(W)

    def module(x: Any) -> Any:
        sizes.append(len(x))
        return x @ weights

    return torch_run(module)


ENGINES = [
    pytest.param(product, id="numpy"),
    pytest.param(through_openvino, id="openvino", marks=needs_openvino),
    pytest.param(through_torch, id="torch", marks=needs_torch),
]


async def served(executor: ThreadExecutor | ProcessExecutor, rows: Sequence[Any]) -> list[Any]:
    times = [1.0] * LARGEST
    options = RouterOptions(example=rows[0])
    async with Router([executor], [times], gpu_only(Limits(LARGEST)), options) as router:
        return await asyncio.gather(*(router.submit(row) for row in rows), return_exceptions=True)


@pytest.mark.parametrize("make", ENGINES)
def test_everybody_gets_the_product_of_its_row_and_the_engine_sees_buckets_only(
    make: Callable[[list[int]], Run],
) -> None:
    sizes: list[int] = []
    executor = ThreadExecutor("cpu", make(sizes), LARGEST, buckets=BUCKETS)
    outputs = asyncio.run(served(executor, list(ROWS)))
    np.testing.assert_allclose(np.array(outputs), ROWS @ W, rtol=1e-5, atol=1e-5)
    assert sizes[:3] == list(BUCKETS)  # warm before traffic
    assert set(sizes) == set(BUCKETS)


@pytest.mark.parametrize("make", ENGINES)
def test_a_row_of_another_shape_fails_alone(make: Callable[[list[int]], Run]) -> None:
    sizes: list[int] = []
    executor = ThreadExecutor("cpu", make(sizes), LARGEST, buckets=(8,))
    rows: list[Any] = [*ROWS[:20]]
    rows[3], rows[10], rows[11] = np.ones(5, np.float32), {"y": ROWS[10]}, np.array("text")
    outputs = asyncio.run(served(executor, rows))
    wrong = [k for k, each in enumerate(outputs) if isinstance(each, Exception)]
    assert wrong == [3, 10, 11]
    assert "float32 of shape (5,), not float32 of shape (6,)" in str(outputs[3])
    assert "inputs ['y'], not ['']" in str(outputs[10])
    for k in set(range(20)) - set(wrong):
        np.testing.assert_allclose(outputs[k], ROWS[k] @ W, rtol=1e-5, atol=1e-5)
    assert set(sizes) == {8}


def test_arrays_by_name_go_in_and_come_out_by_name() -> None:
    run = ByRows(lambda arrays: {"sum": arrays["a"] + arrays["b"], "rank": arrays["a"][:, 0]})
    first, second = run([{"a": [1, 2], "b": [3, 4]}, {"a": [5, 6], "b": [7, 8]}])
    assert first["sum"].tolist() == [4, 6]
    assert (second["sum"].tolist(), second["rank"]) == ([12, 14], 5)


@needs_torch
def test_torch_modules_names_outputs_and_bf16() -> None:
    import torch

    class Two(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, scale: Any) -> Any:
            return {"product": x @ torch.from_numpy(W), "scaled": x * scale[:, None], "note": "none"}

    given = [{"x": row, "scale": np.float32(k)} for k, row in enumerate(ROWS[:5])]
    outputs = torch_run(Two())(given)
    np.testing.assert_allclose([each["product"] for each in outputs], ROWS[:5] @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([each["scaled"] for each in outputs], ROWS[:5] * np.arange(5)[:, None])
    narrow = torch_run(Two(), bf16=True)(given)
    found = np.array([each["product"] for each in narrow])
    assert found.dtype == np.float32
    error = np.abs(found - ROWS[:5] @ W)
    assert 0 < error.max() < 0.1  # 8 bits of some units
