"""Other batchers given the work that `benchmarks.router_overhead` gives the router: the same senders, the same function
and the same largest batch, each set for the least latency.

* Ray Serve: `@serve.batch` on the event loop of the senders, as inside a replica, of which only the context is made; no
  Ray cluster, no proxy. The function runs in a thread.
* LitServe: its request handler, its queues and its worker process, without FastAPI's routes and HTTP before them.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Submit = Callable[[Any], Awaitable[Any]]
Measured = tuple[list[float], list[float], float]
"""µs of hops with pauses and without, requests/s."""

Measure = Callable[[Submit, int], Awaitable[Measured]]

LitAPI: Any = import_module("litserve").LitAPI if find_spec("litserve") else object


def same(inputs: list[Any]) -> list[Any]:
    return inputs


def by_ray_serve(largest: int, measure: Measure, count: int) -> Measured:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray import serve
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.config import DeploymentConfig
    from ray.serve.context import _set_internal_replica_context
    from ray.serve.schema import ReplicaRank

    async def main() -> Measured:
        _set_internal_replica_context(
            replica_id=ReplicaID("benchmark", DeploymentID("benchmark")),
            servable_object=same,
            _deployment_config=DeploymentConfig(max_ongoing_requests=1024),
            rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
            world_size=1,
        )

        @serve.batch(max_batch_size=largest, batch_wait_timeout_s=0.0)  # type: ignore[untyped-decorator]
        async def batched(items: list[Any]) -> list[Any]:
            return await asyncio.get_running_loop().run_in_executor(None, same, items)

        return await measure(batched, count)

    return asyncio.run(main())


class Same(LitAPI):  # type: ignore[misc]
    """LitServe's worker with the function that gives its inputs back."""

    def setup(self, device: str) -> None: ...

    def decode_request(self, request: dict[str, Any]) -> Any:
        return request["item"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: list[Any]) -> list[Any]:
        return same(x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Any:
        return output


class LitServe:
    def __init__(self, largest: int, measure: Measure) -> None:
        from litserve import LitServer
        from litserve.server import RegularRequestHandler

        api = Same(max_batch_size=largest, batch_timeout=0.0)
        self._server, self._measure = LitServer(api, accelerator="cpu"), measure
        self._manager = self._server._init_manager(1)
        self._workers = self._server.launch_inference_worker(api)
        self._server.verify_worker_status()
        self._server.app.response_queue_id = 0
        self._handler = RegularRequestHandler(api, self._server)

    def measured(self, count: int) -> Measured:
        async def submit(item: Any) -> Any:
            return await self._handler.handle_request({"item": item}, dict)

        async def main() -> Measured:
            async with self._server.lifespan(self._server.app):
                return await self._measure(submit, count)

        return asyncio.run(main())

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join()
        self._manager.shutdown()
