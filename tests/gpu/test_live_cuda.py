"""torch on a GPU behind the router: as on the CPU, from several threads at a time."""

import asyncio
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from latfit.live import Router, RouterOptions, ThreadExecutor, torch_run
from latfit.policies import Limits
from latfit.policies.policy import gpu_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed (latfit[torch])"),
]


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def test_rows_come_back_as_from_the_cpu() -> None:
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    rows = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    expected = np.array(torch_run(module)(list(rows)))

    async def main() -> list[Any]:
        gpu = ThreadExecutor("gpu", torch_run(module, device="cuda"), 32, servers=2, buckets=(1, 8, 32))
        async with Router([gpu], [[1.0] * 32], gpu_only(Limits(32)), RouterOptions(example=rows[0])) as router:
            return list(await asyncio.gather(*(router.submit(row) for row in rows)))

    np.testing.assert_allclose(np.array(asyncio.run(main())), expected, atol=1e-2)  # TF32 keeps 10 bits


def test_bf16_is_near() -> None:
    import torch

    module = torch.nn.Linear(64, 8)
    rows = [np.full(64, 1 / 64, np.float32)] * 4
    expected = np.array(torch_run(module)(rows))
    np.testing.assert_allclose(np.array(torch_run(module, device="cuda", bf16=True)(rows)), expected, atol=0.05)
