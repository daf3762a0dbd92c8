"""Read `/metrics` of a running server over HTTP, each read within one time limit from connect to last byte."""

import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from latfit.errors import BadInput, WrongUsage
from latfit.inputs import decode_json
from latfit.metrics.deadline import timed_opener
from latfit.metrics.exposition import MOST_BYTES
from latfit.metrics.state import ServerState, state_of

TIMEOUT_S, SETTINGS_S = 5.0, 15.0
"""vLLM collects much besides its settings when it is asked for them first."""
BLOCK = 1 << 16
PLACES = ("/metrics", "/prometheus/metrics")
"""Where servers publish; `trtllm-serve` has JSON of its own under the first."""

LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
SETTINGS = ("/server_info?config_format=json", "/get_server_info", "/server_info", "/props")
"""Where servers that say it tell their settings: vLLM with VLLM_SERVER_DEV_MODE=1, SGLang, newer SGLang, llama.cpp."""

SETTING_NAMES = {
    "max_num_seqs": "max_num_seqs",
    "max_running_requests": "max_num_seqs",
    "total_slots": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "async_scheduling": "async_scheduling",
    "num_speculative_tokens": "num_speculative_tokens",
}
"""Their names → those of a recorder's provenance."""

DEEPEST = 6


@dataclass(frozen=True)
class Reading:
    """What a server said. t_s: the middle of the request, on this process's clock; took_s: how long it took."""

    t_s: float
    took_s: float
    text: bytes
    state: ServerState


class Unanswered(Exception):
    """The server did not answer this time, or not with metrics; the reason in words."""


class Server:
    """A server by its address: `http://host:8000`, `host:8000`, or the whole address of its metrics."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Raises WrongUsage for what is no address of HTTP."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or _port(parts) == 0:
            raise WrongUsage(f"{url!r} is no address of a server", where="URL", remedy="Write http://localhost:8000.")
        self.base = f"{parts.scheme}://{parts.netloc}"
        self.places = PLACES if parts.path in ("", "/") else (parts.path + (f"?{parts.query}" if parts.query else ""),)
        self.timeout_s = timeout_s
        self._opener = timed_opener(direct=parts.hostname in LOCAL)

    def __str__(self) -> str:
        return self.base

    def first(self) -> Reading:
        """The first reading, which shows where the metrics are. Raises BadInput where nobody answers, or with something
        else."""
        reasons = []
        for place in self.places:
            try:
                found = self._read(place)
            except Unanswered as error:
                reasons.append(str(error))
                continue
            self.places = (place,)
            return found
        raise BadInput(
            reasons[0],
            where=f"{self.base}{self.places[0]}",
            remedy="Give the address of a running vLLM, SGLang (--enable-metrics), TensorRT-LLM, llama.cpp"
            " (--metrics) or Triton (its metrics' port, 8002): http://localhost:8000.",
        )

    def read(self) -> Reading:
        """One more. Raises Unanswered."""
        return self._read(self.places[0])

    def readings(self, every_s: float, duration_s: float) -> "Iterator[Reading | Unanswered]":
        """Readings at even distances, the first at once; where one is not answered, why. A slow answer takes the place
        of those that were due meanwhile. Raises BadInput where already the first is none."""
        begun = monotonic()
        yield self.first()
        due = 0
        while (due := max(due + 1, int((monotonic() - begun) / every_s))) * every_s <= duration_s + 1e-9:
            sleep(max(0.0, begun + due * every_s - monotonic()))
            try:
                yield self.read()
            except Unanswered as error:
                yield error

    def settings(self) -> dict[str, Any]:
        """What it tells of its settings besides, by the names of a recorder's provenance; empty where nothing. All
        places together are waited for as long as the first may take."""
        end = monotonic() + SETTINGS_S
        for place in SETTINGS:
            if (left_s := end - monotonic()) <= 0:
                break
            try:
                told = decode_json(b"".join(self._blocks(place, left_s)))
            except (Unanswered, ValueError):
                continue
            if found := dict(_settings_in(told)):
                return found
        return {}

    def _read(self, place: str) -> Reading:
        begun = monotonic()
        text = b"".join(self._blocks(place))
        ended = monotonic()
        try:
            state = state_of(BytesIO(text), self.base)
        except BadInput as error:
            raise Unanswered(error.found) from None
        return Reading((begun + ended) / 2, ended - begun, text, state)

    def _blocks(self, place: str, timeout_s: float | None = None) -> Iterator[bytes]:
        """What the server answers, as a whole within the time. Raises Unanswered."""
        patience_s, size = self.timeout_s if timeout_s is None else timeout_s, 0
        try:
            with self._opener.open(f"{self.base}{place}", timeout=patience_s) as answer:
                while block := answer.read1(BLOCK):
                    size += len(block)
                    if size > MOST_BYTES:
                        raise Unanswered(f"answers with more than {MOST_BYTES >> 20} MiB")
                    yield block
        except urllib.error.HTTPError as error:
            raise Unanswered(f"answers {error.code} {error.reason}") from None
        except TimeoutError:
            raise Unanswered(f"does not answer within {patience_s:g} s") from None
        except urllib.error.URLError as error:
            late = isinstance(error.reason, TimeoutError)
            told = f"does not answer within {patience_s:g} s" if late else f"cannot be reached ({error.reason})"
            raise Unanswered(told) from None
        except HTTPException as error:
            raise Unanswered(f"does not speak HTTP ({type(error).__name__})") from None
        except (OSError, ValueError) as error:
            raise Unanswered(f"breaks off ({error})") from None


def _port(parts: Any) -> int | None:
    """0 for a port that is none."""
    try:
        return parts.port  # type: ignore[no-any-return]
    except ValueError:
        return 0


def _settings_in(document: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Known settings anywhere in a document."""
    if isinstance(document, list) and depth < DEEPEST:
        for each in document[:16]:
            yield from _settings_in(each, depth + 1)
    if not isinstance(document, dict):
        return
    for name, value in document.items():
        if name in SETTING_NAMES and isinstance(value, int) and (isinstance(value, bool) or value > 0):
            yield SETTING_NAMES[name], value
        elif depth < DEEPEST:
            yield from _settings_in(value, depth + 1)
