"""An open-loop load on an OpenAI-compatible server: requests go out when they are due, however late earlier ones are.

Times count from the moment a request was due, so a slow client or server hides no waiting (coordinated omission). A
prompt is a list of random token ids: it has exactly the tokens that were asked for, and no cache holds it.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.errors import BadInput
from latfit.workload import Requests

if TYPE_CHECKING:
    from aiohttp import ClientSession

TOKEN_IDS = (100, 1000)
"""Range of the random token ids: words in every vocabulary, above the special tokens."""

WARM_LOADS, WARM = 6, 0.8
"""Most loads to warm an engine up with; it is warm if the median TTFT of one is at least this share of the last."""

CONNECT_S = 30.0
POLL_S = 0.25
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Answered:
    """A request on the client's clock, in s from the start of the load. failure: why it has no answer, else empty."""

    due_s: float
    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    failure: str = ""

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_s - self.due_s)

    @property
    def tpot_ms(self) -> float:
        """NaN for one token."""
        gaps = self.output_tokens - 1
        return 1e3 * (self.last_s - self.first_s) / gaps if gaps > 0 else float("nan")

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.last_s - self.due_s)


def send_load(url: str, model: str, requests: Requests, seed: int, token: str | None = None) -> list[Answered]:
    """Send requests when they are due, and return their times in the order of arrival.

    token: bearer token of the server. Raises BadInput if the server refuses the first request.
    """
    return asyncio.run(_send_all(url, model, requests, seed, _headers(token)))


def warm_up(send: Callable[[int], Sequence[Answered]]) -> None:
    """Send short loads until an engine answers one as fast as the one before.

    A fresh engine compiles and allocates for each size of step that it meets first. send: sends load 0, 1, ...
    """
    last_ms = math.inf
    for number in range(WARM_LOADS):
        median_ms = float(np.median([each.ttft_ms for each in send(number) if not each.failure]))
        if median_ms >= WARM * last_ms:
            break
        last_ms = median_ms


def until_answered(url: str, timeout_s: float, alive: Any = None, token: str | None = None) -> str:
    """Wait until the server lists its model, and return the model's name.

    alive: called again and again; a text says why to stop waiting. Raises BadInput.
    """
    return asyncio.run(_until_answered(url, timeout_s, alive, _headers(token)))


def model_served(document: Any, url: str) -> str:
    """Return the first model of a server's `/v1/models`. Raises BadInput."""
    try:
        return str(document["data"][0]["id"])
    except (LookupError, TypeError):
        raise BadInput("lists no model", where=f"{url}/v1/models", remedy="Name it: --served-model NAME.") from None


async def _until_answered(url: str, timeout_s: float, alive: Any, headers: Mapping[str, str]) -> str:
    from aiohttp import ClientError, ClientSession, ClientTimeout

    until = time.monotonic() + timeout_s
    async with ClientSession(headers=headers, timeout=ClientTimeout(total=5.0)) as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models") as answer:
                    if answer.status == 200:
                        return model_served(await answer.json(content_type=None), url)
                    reason = f"answered {answer.status}"
            except (ClientError, TimeoutError, ValueError):
                reason = "did not answer"
            if stopped := alive() if alive is not None else "":
                raise BadInput(stopped, where=url, remedy="Its log says why.")
            if time.monotonic() > until:
                raise BadInput(f"{reason} within {timeout_s:.0f} s", where=f"{url}/v1/models", remedy="Is it up?")
            await asyncio.sleep(POLL_S)


async def _send_all(url: str, model: str, requests: Requests, seed: int, headers: Mapping[str, str]) -> list[Answered]:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(*TOKEN_IDS, size=int(n)).tolist() for n in requests.prompt_tokens]
    bodies = [
        json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": int(output),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
            }
        ).encode()
        for prompt, output in zip(prompts, requests.output_tokens, strict=True)
    ]
    due = (requests.arrival_ms / 1e3).tolist()
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with ClientSession(headers=headers, connector=TCPConnector(limit=0), timeout=timeout) as session:
        begun = time.monotonic()

        async def one(i: int) -> Answered:
            await asyncio.sleep(begun + due[i] - time.monotonic())
            return await _ask(session, f"{url}{COMPLETIONS}", bodies[i], (begun, due[i], len(prompts[i])))

        return await asyncio.gather(*map(one, range(len(due))))


async def _ask(session: "ClientSession", url: str, body: bytes, about: tuple[float, float, int]) -> Answered:
    """Send one request and read its stream. about: start of the load, when it is due, tokens of the prompt."""
    from aiohttp import ClientError

    begun, due, prompt = about
    sent = first = last = time.monotonic() - begun
    chunks, usage, failure = 0, 0, ""
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            if answer.status != 200:
                failure = f"{answer.status}: {(await answer.text())[:200]}"
            else:
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now, event = time.monotonic() - begun, json.loads(line[6:])
                    if event.get("choices"):
                        first = first if chunks else now
                        last, chunks = now, chunks + 1
                    usage = (event.get("usage") or {}).get("completion_tokens", usage)
                failure = "" if chunks else "no token came"
    except (ClientError, ValueError, TimeoutError) as error:
        failure = str(error) or type(error).__name__
    return Answered(due, sent, first, last, prompt, usage or chunks, failure)


def _headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
