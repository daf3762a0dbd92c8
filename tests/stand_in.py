"""A server that publishes `/metrics` as an engine with planted steps does, over real HTTP on this machine."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE = 'block_size="16",num_gpu_blocks="1000",kv_cache_size_tokens="16000"'
LABELS = 'engine="0",model_name="m"'
TTFT = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
GAPS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
Array = NDArray[np.floating[Any]]
Whole = NDArray[np.integer[Any]]


@dataclass
class Steps:
    """Steps one after another: when each ended (s), what it held, how long it took (s), and who waited at its end."""

    end: Array
    seconds: Array
    decoding: Array
    prompts: Array
    prompt_tokens: Array
    waiting: Array
    kv_usage: Array
    preemptions: Array = field(default_factory=lambda: np.zeros(0))
    prompt_length: int = 100
    output_length: int = 20

    def text(self, t: float) -> str:
        """What vLLM publishes at a time: every request has the same lengths, and ends when its tokens are made."""
        done = self.end <= t
        D, F, P = (each[done] for each in (self.decoding, self.prompts, self.prompt_tokens))
        last = int(done.sum()) - 1
        idle = last < 0 or t - self.end[last] > 10 * self.seconds[last]
        running = 0.0 if idle else self.decoding[last] + self.prompts[last]
        finished = D.sum() // (self.output_length - 1)
        lost = self.preemptions[done].sum() if len(self.preemptions) else 0.0
        gaps = np.repeat(self.seconds[done], D.astype(int))
        first = np.repeat(self.seconds[done], F.astype(int))
        requests = np.ones(int(finished))
        lines = [
            *counter("num_requests_running", running),
            *counter("num_requests_waiting", 0.0 if idle else self.waiting[last]),
            *counter("kv_cache_usage_perc", 0.0 if idle else self.kv_usage[last]),
            *counter("prompt_tokens_total", P.sum()),
            *counter("prompt_tokens_by_source_total", P.sum(), ',source="local_compute"'),
            *counter("generation_tokens_total", D.sum() + F.sum()),
            *counter("num_preemptions_total", lost),
            *counter("request_success_total", finished, ',finished_reason="length"'),
            *histogram("time_to_first_token_seconds", first, TTFT),
            *histogram("inter_token_latency_seconds", gaps, GAPS),
            *histogram("request_time_per_output_token_seconds", requests * self.seconds.mean(), GAPS),
            *histogram("e2e_request_latency_seconds", requests, TTFT),
            *histogram("request_queue_time_seconds", requests * 0.0, TTFT),
            *histogram("request_prompt_tokens", requests * self.prompt_length, LENGTHS),
            *histogram("request_generation_tokens", requests * self.output_length, LENGTHS),
            *histogram("iteration_tokens_total", D + F + P, STEP_TOKENS),
            f"vllm:cache_config_info{{{CACHE},{LABELS}}} 1.0",
        ]
        return "\n".join(lines) + "\n"


def counter(name: str, value: float, more: str = "") -> list[str]:
    return [f"# TYPE vllm:{name} x", f"vllm:{name}{{{LABELS}{more}}} {float(value)!r}"]


def histogram(name: str, values: Array, edges: tuple[float, ...]) -> list[str]:
    lines = [f'vllm:{name}_bucket{{{LABELS},le="{edge}"}} {float((values <= edge).sum())}' for edge in edges]
    lines.append(f'vllm:{name}_bucket{{{LABELS},le="+Inf"}} {float(len(values))}')
    return [
        *lines,
        f"vllm:{name}_count{{{LABELS}}} {float(len(values))}",
        f"vllm:{name}_sum{{{LABELS}}} {float(values.sum())!r}",
    ]


def steady(seconds: float, decoding: int, step_s: float, waiting: int = 0, kv_usage: float = 0.3) -> Steps:
    """An engine that decodes `decoding` requests in every step, with one prompt of 100 tokens in every tenth."""
    n = int(seconds / step_s)
    ones = np.ones(n)
    tenth = (np.arange(n) % 10 == 9) * 1.0
    return Steps(
        end=step_s * (np.arange(n) + 1),
        seconds=step_s * ones,
        decoding=decoding * ones,
        prompts=tenth,
        prompt_tokens=100 * tenth,
        waiting=waiting * ones,
        kv_usage=kv_usage * ones,
    )


def in_a_row(parts: list[Steps], each_s: float) -> Steps:
    """Parts one after another, each so long."""

    def joined(name: str) -> Array:
        return np.concatenate([getattr(part, name) for part in parts])

    return Steps(
        end=np.concatenate([part.end + each_s * i for i, part in enumerate(parts)]),
        seconds=joined("seconds"),
        decoding=joined("decoding"),
        prompts=joined("prompts"),
        prompt_tokens=joined("prompt_tokens"),
        waiting=joined("waiting"),
        kv_usage=joined("kv_usage"),
    )


Answer = Callable[[str], tuple[int, bytes]]
"""Path → status and body."""


@contextmanager
def serving(answer: Answer, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """A server on this machine that answers so, with these headers; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            for each in (headers or {}).items():
                self.send_header(*each)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Who asked has gone away."""

    server = Quiet(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def one_after_another(texts: list[str], pages: Mapping[str, str] | None = None) -> Answer:
    """Texts of `/metrics` in their order, the last again and again; an empty one is an error of the server."""
    left = iter(texts)
    now = [""]
    known = pages or {}

    def answer(path: str) -> tuple[int, bytes]:
        if path != "/metrics":
            return (200, known[path].encode()) if path in known else (404, b"")
        now[0] = next(left, now[0])
        return (200, now[0].encode()) if now[0] else (503, b"")

    return answer


def live(steps: "Steps | Served") -> Answer:
    """The engine as it goes on, from its tenth second."""
    begun = monotonic()

    def answer(path: str) -> tuple[int, bytes]:
        return (200, steps.text(10 + monotonic() - begun).encode()) if path == "/metrics" else (404, b"")

    return answer


def served(
    arrival_s: Array, prompt: Whole, output: Whole, seconds_of: Callable[[int, int], float], most: int = 64
) -> "Served":
    """Requests through an engine that makes one step after the other: who came is let in first come, first served, with
    its whole prompt, while fewer than `most` run; each that is in decodes a token a step."""
    waiting, left = list(range(len(arrival_s))), np.array(output)
    running: list[int] = []
    begun, first, last = np.zeros((3, len(left)))
    now, steps = 0.0, []
    while waiting or running:
        if not running and arrival_s[waiting[0]] > now:
            now = float(arrival_s[waiting[0]])
        came = [each for each in waiting if arrival_s[each] <= now][: most - len(running)]
        waiting = waiting[len(came) :]
        begun[came] = now
        tokens = int(sum(prompt[each] for each in came))
        seconds = seconds_of(len(running) + len(came), len(running) + tokens)
        now += seconds
        steps.append((now, seconds, len(running), len(came), tokens))
        first[came] = now
        left[running + came] -= 1
        last[running + came] = now
        running = [each for each in running + came if left[each] > 0]
    return Served(np.array(steps), arrival_s, begun, first, last, prompt, output)


@dataclass
class Served:
    """What became of requests. steps (n, 5): end, seconds, requests that decode, those with a prompt, prompt tokens;
    times in seconds by request."""

    steps: Array
    arrival: Array
    begun: Array
    first: Array
    last: Array
    prompt: Whole
    output: Whole

    def text(self, t: float) -> str:
        """What vLLM publishes at a time."""
        end, seconds, D, F, P = self.steps[self.steps[:, 0] <= t].T
        told, done = (times <= t for times in (self.first, self.last))
        since = end[-1] - seconds[-1] + 1e-9 if len(end) else 0.0  # gauges are those of the last step
        began, known = self.begun <= since, self.arrival <= since
        ttft, latency = (self.first - self.arrival)[told], (self.last - self.arrival)[done]
        tpot = ((self.last - self.first) / np.maximum(self.output - 1, 1))[done & (self.output > 1)]
        lines = [
            *counter("num_requests_running", (began & ~done).sum()),
            *counter("num_requests_waiting", (known & ~began).sum()),
            *counter("kv_cache_usage_perc", 0.1),
            *counter("prompt_tokens_total", P.sum()),
            *counter("prompt_tokens_by_source_total", P.sum(), ',source="local_compute"'),
            *counter("generation_tokens_total", D.sum() + F.sum()),
            *counter("num_preemptions_total", 0),
            *counter("request_success_total", done.sum(), ',finished_reason="length"'),
            *histogram("time_to_first_token_seconds", ttft, TTFT),
            *histogram("inter_token_latency_seconds", np.repeat(seconds, D.astype(int)), GAPS),
            *histogram("request_time_per_output_token_seconds", tpot, GAPS),
            *histogram("e2e_request_latency_seconds", latency, TTFT),
            *histogram("request_queue_time_seconds", (self.begun - self.arrival)[done], TTFT),
            *histogram("request_prompt_tokens", 1.0 * self.prompt[done], LENGTHS),
            *histogram("request_generation_tokens", 1.0 * self.output[done], LENGTHS),
            *histogram("iteration_tokens_total", D + F + P, STEP_TOKENS),
            f"vllm:cache_config_info{{{CACHE},{LABELS}}} 1.0",
        ]
        return "\n".join(lines) + "\n"
