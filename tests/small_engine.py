"""A serving engine in plain Python, with planted step times: HTTP, streaming, real queueing, vLLM's `/metrics`.

python tests/small_engine.py --port 8000 --max-num-seqs 4 --max-num-batched-tokens 64
"""

import argparse
import asyncio
import json
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler

STEP_MS, REQUEST_MS, TOKEN_MS = 4.0, 0.25, 0.02
"""T = STEP_MS + REQUEST_MS * B + TOKEN_MS * S."""

EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(eq=False)
class Asked:
    """A request. left: tokens of its prompt that are not computed."""

    left: int
    tokens: int
    made: "asyncio.Queue[bool]" = field(default_factory=asyncio.Queue)
    begun: bool = False


class Engine:
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, most: float) -> None:
        self.seqs, self.budget, self.most, self.accepted = max_num_seqs, max_num_batched_tokens, most, 0
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.come = asyncio.Event()
        self.prompt_tokens = self.generated = self.finished = self.first_tokens = 0
        self.steps = dict.fromkeys(EDGES, 0)
        self.count = self.sum = 0
        self.prompts: set[tuple[int, ...]] = set()
        self.repeated = 0

    async def run(self) -> None:
        while True:
            while not self.running and not self.waiting:
                self.come.clear()
                await self.come.wait()
            await self.step()

    async def step(self) -> None:
        """Decode first, then prompts in the order of arrival, within both limits."""
        due = time.monotonic()
        decoding = [each for each in self.running if not each.left][: self.budget]
        room = self.budget - len(decoding)
        while self.waiting and len(self.running) < self.seqs:
            self.running.append(self.waiting.popleft())
        chunks = []
        for each in self.running:
            if each.left and room:
                chunk = min(each.left, room)
                chunks.append((each, chunk))
                room -= chunk
        B, S = len(decoding) + len(chunks), len(decoding) + sum(chunk for _, chunk in chunks)
        await asyncio.sleep(due + 1e-3 * (STEP_MS + REQUEST_MS * B + TOKEN_MS * S) - time.monotonic())
        for each, chunk in chunks:
            each.left -= chunk
            self.prompt_tokens += chunk
        self.first_tokens += sum(not each.left for each, _ in chunks)
        ready = [*decoding, *(each for each, _ in chunks if not each.left)]
        for each in ready:
            each.tokens -= 1
            self.generated += 1
            each.made.put_nowait(each.tokens > 0)
        ended = [each for each in ready if not each.tokens]
        self.finished += len(ended)
        self.running = [each for each in self.running if each not in ended]
        self.count, self.sum = self.count + 1, self.sum + S
        for edge in EDGES:
            self.steps[edge] += edge >= S

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.accepted += 1
        if self.accepted > self.most:
            os._exit(9)
        prompt = tuple(body["prompt"])
        self.repeated += len(prompt) * (prompt in self.prompts)
        self.prompts.add(prompt)
        asked = Asked(len(prompt), body["max_tokens"])
        self.waiting.append(asked)
        self.come.set()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        more, count = True, 0
        while more:
            more, count = await asked.made.get(), count + 1
            await answer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": count}}
        await answer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return answer

    async def metrics(self, _: web.Request) -> web.Response:
        labels = 'engine="0",model_name="small"'
        values = {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": 0.01,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated,
            "num_preemptions_total": 0,
            "prefix_cache_queries_total": self.prompt_tokens,
            "prefix_cache_hits_total": self.repeated,
        }
        lines = [f"vllm:{name}{{{labels}}} {value}" for name, value in values.items()]
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="length"}} {self.finished}')
        lines += [f'vllm:iteration_tokens_total_bucket{{{labels},le="{e}"}} {self.steps[e]}' for e in EDGES]
        lines.append(f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {self.count}')
        lines.append(f"vllm:iteration_tokens_total_count{{{labels}}} {self.count}")
        lines.append(f"vllm:iteration_tokens_total_sum{{{labels}}} {self.sum}")
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {self.first_tokens}')
        lines.append(f"vllm:time_to_first_token_seconds_count{{{labels}}} {self.first_tokens}")
        lines.append(f"vllm:time_to_first_token_seconds_sum{{{labels}}} 0")
        lines.append(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="10000",{labels}}} 1.0')
        return web.Response(text="\n".join(lines) + "\n")


async def serve(port: int, engine: Engine, key: str | None) -> None:
    @web.middleware
    async def refuse_others(request: web.Request, handler: Handler) -> web.StreamResponse:
        wrong = key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}"
        return web.Response(status=401) if wrong else await handler(request)

    app = web.Application(middlewares=[refuse_others])
    app.add_routes(
        [
            web.get("/v1/models", engine.models),
            web.post("/v1/completions", engine.completions),
            web.get("/metrics", engine.metrics),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--no-async-scheduling", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--dies-after", type=float, default=math.inf, metavar="REQUESTS")
    given = parser.parse_args()
    asyncio.run(
        serve(given.port, Engine(given.max_num_seqs, given.max_num_batched_tokens, given.dies_after), given.api_key)
    )


if __name__ == "__main__":
    main()
