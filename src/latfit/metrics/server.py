"""Read `/metrics` of a running server over HTTP, within a time limit and without following redirects."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from latfit.engines import ENGINES, describe_engines, setting_names
from latfit.errors import BadInput, no_address
from latfit.inputs import decode_json
from latfit.metrics.state import MAX_BYTES, ServerState, state_of

TIMEOUT_S = 5.0
SETTINGS_TIMEOUT_S = 15.0  # vLLM collects other facts before its first answer
BLOCK = 1 << 16
PLACES = ("/metrics", "/prometheus/metrics")  # `trtllm-serve` has JSON of its own under the first
LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
MAX_DEPTH = 6  # of a document in which settings are looked for
LOCAL_PORTS = tuple(dict.fromkeys(engine.port for engine in ENGINES))
LOCAL_TIMEOUT_S = 1.0


def local_engine() -> str | None:
    """Return the address of an engine on this machine, by the engines' default ports; None if none answers."""
    for port in LOCAL_PORTS:
        server = Server(f"http://127.0.0.1:{port}", LOCAL_TIMEOUT_S)
        try:
            server.first()
        except BadInput:
            continue
        return str(server)
    return None


@dataclass(frozen=True)
class Reading:
    """An answer of a server: the middle of the request on this process's clock, how long it took, text and state."""

    t_s: float
    took_s: float
    text: bytes
    state: ServerState


class Unanswered(Exception):
    """The server did not answer with metrics; the text is the reason."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Reports a redirect as the answer, so that nothing is read from an address that was not given."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """A server by its address: `http://host:8000`, `host:8000`, or the address of its metrics. Raises WrongUsage."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number
            is_address = False
        if not is_address or "@" in parts.netloc:
            raise no_address(url, "a server")
        self.base = f"{parts.scheme}://{parts.netloc}"
        self.places = PLACES if parts.path in ("", "/") else (parts.path + (f"?{parts.query}" if parts.query else ""),)
        self.place = self.places[0]
        self.timeout_s = timeout_s
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in LOCAL else []
        self._opener = urllib.request.build_opener(_NoRedirects, *proxies)

    def __str__(self) -> str:
        return self.base

    def first(self) -> Reading:
        """Read for the first time, which shows where the metrics are. Raises BadInput if no engine answers."""
        reasons = []
        for place in self.places:
            self.place = place
            try:
                return self.read()
            except Unanswered as error:
                reasons.append(str(error))
        remedy = f"Give the address of a running {describe_engines()}: http://localhost:8000."
        raise BadInput(reasons[0], where=f"{self.base}{self.places[0]}", remedy=remedy)

    def read(self) -> Reading:
        begun = monotonic()
        text = self._get(self.place, self.timeout_s)
        ended = monotonic()
        try:
            state = state_of(BytesIO(text), self.base)
        except BadInput as error:
            raise Unanswered(error.found) from None
        return Reading((begun + ended) / 2, ended - begun, text, state)

    def readings(self, every_s: float, duration_s: float) -> "Iterator[Reading | Unanswered]":
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
        """Return the settings that the server publishes elsewhere, by the names of a recorder's provenance."""
        end, names = monotonic() + SETTINGS_TIMEOUT_S, setting_names()
        for place in dict.fromkeys(place for engine in ENGINES for place in engine.settings_places):
            if (left_s := end - monotonic()) <= 0:
                break
            try:
                document = decode_json(self._get(place, left_s))
            except (Unanswered, ValueError):
                continue
            if found := dict(_settings_in(document, names)):
                return found
        return {}

    def _get(self, place: str, patience_s: float) -> bytes:
        """Return an answer that is whole within the time. Raises Unanswered."""
        end, text = monotonic() + patience_s, bytearray()
        try:
            with self._opener.open(f"{self.base}{place}", timeout=patience_s) as answer:
                while block := answer.read1(BLOCK):
                    text += block
                    if len(text) > MAX_BYTES:
                        raise Unanswered(f"answers with more than {MAX_BYTES >> 20} MiB")
                    if monotonic() > end:
                        raise TimeoutError
            return bytes(text)
        except urllib.error.HTTPError as error:
            raise Unanswered(f"answers {error.code} {error.reason}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            found = f"does not answer within {patience_s:g} s" if late else f"cannot be reached ({reason})"
            raise Unanswered(found) from None


def _settings_in(document: Any, names: Mapping[str, str], depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(document, list) and depth < MAX_DEPTH:
        for each in document[:16]:
            yield from _settings_in(each, names, depth + 1)
    for name, value in document.items() if isinstance(document, dict) else ():
        if name in names and isinstance(value, int) and (isinstance(value, bool) or value > 0):
            yield names[name], value
        elif depth < MAX_DEPTH:
            yield from _settings_in(value, names, depth + 1)
