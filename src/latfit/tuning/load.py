"""An open-loop load on an OpenAI-compatible server: requests go out when they are due, however late earlier ones are.

Times count from the moment a request was due, so a slow client or server hides no waiting (coordinated omission). A
prompt is a list of random token ids: it has exactly the tokens that were asked for. Each load draws new prompts, so no
prefix cache holds one; requests of one load share blocks of prompts as recorded.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

from latfit.errors import BadInput
from latfit.workload import Requests

TOKEN_IDS = (100, 1000)  # ordinary words of every vocabulary, above the special tokens
CONNECT_S, POLL_S, POLL_TIMEOUT_S = 30.0, 0.25, 5.0
SILENT_S = 300.0  # longest time without a byte of an answer
WARM_LOADS = 6  # most loads to warm an engine up with
WARM = 0.8  # the engine is warm when the median TTFT of a load is at least this share of the one before


@dataclass(frozen=True)
class Answered:
    """A request on the client's clock, in s from the start of the load.

    failure: why it has no answer, else empty; its times mean nothing then.
    """

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
        """NaN if one token came."""
        gaps = self.output_tokens - 1
        return 1e3 * (self.last_s - self.first_s) / gaps if gaps > 0 else float("nan")

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.last_s - self.due_s)


def until_answered(
    url: str, timeout_s: float, why_gone: Callable[[], str] = lambda: "", token: str | None = None
) -> str:
    """Wait until the server lists its model, and return the model's name.

    why_gone: called again and again; a text says why to stop waiting. Raises BadInput.
    """
    until, models = time.monotonic() + timeout_s, f"{url}/v1/models"
    opener = build_opener(ProxyHandler({}))
    while True:
        try:
            with opener.open(Request(models, headers=_headers(token)), timeout=POLL_TIMEOUT_S) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (LookupError, TypeError):
            raise BadInput("lists no model", where=models, remedy="Name it: --served-model-name NAME.") from None
        except HTTPError as error:
            reason = f"answered {error.code}"
            if error.code in (401, 403):
                remedy = "Set LATFIT_ENGINE_TOKEN, or give the command its --api-key."
                raise BadInput(reason, where=models, remedy=remedy) from None
        except (OSError, ValueError, HTTPException):
            reason = "did not answer"
        if reason_gone := why_gone():
            raise BadInput(reason_gone, where=url, remedy="Its log says why.")
        if time.monotonic() > until:
            raise BadInput(f"{reason} within {timeout_s:.0f} s", where=models, remedy="Is it up?")
        time.sleep(POLL_S)


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


def send_load(
    url: str, model: str, requests: Requests, seed: int | Sequence[int], token: str | None = None
) -> list[Answered]:
    """Send requests when they are due, and return their times in the order of arrival.

    seed: of the prompts; that of an earlier load repeats its prompts, which the engine may have cached.  token: bearer
    token of the server.
    """
    prompts = _make_prompts(requests, np.random.default_rng(seed))
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
    due_s = (requests.arrival_ms / 1e3).tolist()
    return asyncio.run(_send_all(f"{url}/v1/completions", bodies, due_s, [*map(len, prompts)], token))


def _make_prompts(requests: Requests, rng: np.random.Generator) -> list[list[int]]:
    """Return the token ids of each prompt: random ones, the same where recorded blocks of prompts are the same."""
    lengths, blocks = requests.prompt_tokens.tolist(), requests.prefix
    prompts: list[list[int]] = [[] for _ in lengths]
    if blocks is not None:
        known, ids = np.unique(blocks.ids, return_inverse=True)
        contents = rng.integers(*TOKEN_IDS, size=(len(known), blocks.tokens))
        bounds = zip(blocks.starts[:-1], blocks.starts[1:], strict=True)
        prompts = [contents[ids[first:last]].ravel().tolist() for first, last in bounds]
    return [
        begun[:length] + rng.integers(*TOKEN_IDS, size=max(length - len(begun), 0)).tolist()
        for begun, length in zip(prompts, lengths, strict=True)
    ]


async def _send_all(
    url: str, bodies: Sequence[bytes], due_s: Sequence[float], prompt_tokens: Sequence[int], token: str | None
) -> list[Answered]:
    from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

    timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
    headers = {"Content-Type": "application/json", **_headers(token)}
    async with ClientSession(headers=headers, connector=TCPConnector(limit=0), timeout=timeout) as session:
        begun = time.monotonic()

        async def send(body: bytes, due: float, tokens: int) -> Answered:
            await asyncio.sleep(begun + due - time.monotonic())
            sent = first = last = time.monotonic() - begun
            chunks, usage, failure = 0, 0, ""
            try:
                async with session.post(url, data=body) as answer:
                    if answer.status != 200:
                        failure = f"{answer.status}: {(await answer.text())[:200]}"
                    async for line in answer.content:
                        if failure or not line.startswith(b"data: {"):
                            continue
                        now, event = time.monotonic() - begun, json.loads(line[6:])
                        if error := event.get("error"):
                            failure = str(error)[:200]
                        elif event.get("choices"):
                            first = first if chunks else now
                            last, chunks = now, chunks + 1
                        usage = (event.get("usage") or {}).get("completion_tokens", usage)
                    failure = failure or ("" if chunks else "no token came")
            except (ClientError, ValueError, TimeoutError) as error:
                failure = str(error) or type(error).__name__
            return Answered(due, sent, first, last, tokens, usage or chunks, failure)

        return await asyncio.gather(*map(send, bodies, due_s, prompt_tokens))


def _headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
