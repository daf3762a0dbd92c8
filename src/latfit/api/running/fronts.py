"""`serve`: the router as an HTTP front before one or two running engines."""

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.api.answer import Answer, State
from latfit.api.hardware import DEFAULT_PATH, profile_of
from latfit.api.quantities import by_name, count, duration as in_ms, several
from latfit.api.request import verb
from latfit.api.requests import ServeRequest
from latfit.errors import HardwareMissing, Interrupted, WrongUsage
from latfit.hardware import ExecutionPath, PathLatency
from latfit.live import Router, RouterOptions
from latfit.policies import PathTimes, Policy, Settings, named_policy
from latfit.simulation import System
from latfit.units import count_text, format_ms, parse_bytes
from latfit.workload import parse_lengths

if TYPE_CHECKING:
    from latfit.live import Front

FRONT_POLICIES = ("gpu-only", "three-stage", "cutoff", "split")
"""Policies that mean something where every batch is one request: an engine forms its batches itself."""

SLOTS = 8
UNKNOWN_MS = 1000.0  # T(1) where nobody says it and no rule goes by it
OVERDUE, MIN_OVERDUE_S = 20.0, 1.0  # T(1) that a caller waits without a byte until its leaving shows a hung engine
MIN_TOKEN = 8  # letters
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPEN = " Whoever reaches this machine may send: no token is set."


@dataclass(frozen=True, repr=False, eq=False)
class Served(Answer):
    """What a front did until it was stopped. url: where it listened.  counts: requests by how they ended.  batches:
    those that each path was given."""

    url: str
    counts: Mapping[str, int]
    batches: Mapping[str, int]

    @property
    def verdict(self) -> str:
        """How many were served, and by whom."""
        by = ", ".join(f"{count:,} to {name}" for name, count in self.batches.items())
        others = [f"{self.counts[name]:,} {name}" for name in ("failed", "refused", "cancelled") if self.counts[name]]
        return f"Served {self.counts['done']:,} requests ({by}){'; ' if others else ''}{', '.join(others)}."

    @property
    def state(self) -> State:
        return "doubt" if self.counts["failed"] or self.counts["refused"] else "good"

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit serve --json`."""
        return {"url": self.url, "requests": dict(self.counts), "batches": dict(self.batches)}


@verb(ServeRequest)
def serve(request: ServeRequest) -> Served:
    """Stand before running engines and pass each request on to one of them, until SIGTERM or SIGINT.

    engines: their addresses by name, the main path first; the address alone of the only one.  times: typical times of
    a whole reply; with hardware they are those of requests of these lengths, by the fit of that name. A request may
    name its class in its header x-latfit-class; one that names none is of the last. Raises WrongUsage, BadInput,
    HardwareMissing, TargetNotWritable; Interrupted where requests were cut off.
    """
    live, urls, classes = _import_front(), _addresses(request.engines), _check_classes(request.classes)
    names = list(urls)
    if not 1 <= len(names) <= 2:
        raise WrongUsage(f"{len(names)} engines", where="URL", remedy="Give one or two, the main path first.")
    token = _token_in(request.token_file) if request.token_file is not None else request.token
    token = token and _check_token(token)
    bearer = request.engine_token and _check_token(request.engine_token)
    times = _of_engines(names, request.times, "--times", "gpu=800ms", lambda text: in_ms(text, "--times"))
    given = _of_engines(names, request.slots, "--slots", "gpu=8", lambda text: count(text, "--slots", "gpu=8"))
    slots = {name: given.get(name, SLOTS) for name in names}
    if request.hardware is not None:
        paths = profile_of(request.hardware).paths
        times = {name: _reply_ms(paths[name], request.lengths, slots[name]) for name in names if name in paths} | times
    # One request is a batch for the main path (B1 = 1); T_cut by default is T(1) then, whatever the rate.
    settings = Settings(
        t_cut_ms=None if request.t_cut is None else in_ms(request.t_cut, "--t-cut"),
        B1=1,
        ageing_ms=math.inf if request.ageing is None else in_ms(request.ageing, "--ageing"),
    )
    rule = _make_policy(request.policy or ("three-stage" if len(names) > 1 else "gpu-only"), names, times, settings)
    timeouts = live.HttpTimeouts(
        in_ms(request.connect, "--connect") / 1e3,
        in_ms(request.first_byte, "--first-byte") / 1e3,
        in_ms(request.between, "--between") / 1e3,
    )
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    t_ms = {name: times.get(name, UNKNOWN_MS) for name in names}
    executors = [
        live.HttpExecutor(
            name,
            urls[name],
            slots[name],
            timeouts,
            overdue_s=max(OVERDUE * t_ms[name] / 1e3, MIN_OVERDUE_S),
            headers=headers,
        )
        for name in names
    ]
    limits = RouterOptions(
        most_waiting=request.most_waiting, timeout_ms=math.inf, deadlines_ms=(math.inf,) * max(len(classes), 1)
    )
    options = live.FrontOptions(
        token or None,
        int(parse_bytes(request.max_body, option="--max-body")),
        int(parse_bytes(request.max_memory, option="--max-memory")),
        classes=classes,
    )
    front = live.Front(Router(executors, [[each] for each in t_ms.values()], rule, limits), options)
    if request.learn:
        learner = live.Learner(front.router, thresholds=None if request.t_cut is None else _keep)
        front.registry.register(live.LearnerMetrics(learner))
    with suppress(ImportError):  # where OpenTelemetry is, whatever its own settings make of spans
        live.RequestSpans(front.router)
    aged = f", {format_ms(settings.ageing_ms)} of waiting worth one class" if math.isfinite(settings.ageing_ms) else ""
    ordered = f"; {' before '.join(classes)}{aged}" if classes else ""
    how = f"{_describe(rule, slots, times)}{ordered}.{'' if token or request.host in LOOPBACK else OPEN}"
    drain_s = in_ms(request.drain, "--drain", zero=True) / 1e3
    return asyncio.run(_run(live, front, request, drain_s, how))


def _import_front() -> Any:
    """The package with its front, which needs aiohttp. Raises HardwareMissing."""
    live = import_module("latfit.live")
    try:
        _ = live.FrontServer, live.Front
    except ImportError as error:
        raise HardwareMissing(
            f"{error.name} is not installed", where="latfit serve", remedy="Install it: pip install 'latfit[live]'."
        ) from None
    return live


def _addresses(engines: Any) -> dict[str, str]:
    """By name; one alone needs none. Raises WrongUsage."""
    if not isinstance(engines, Mapping) and len(alone := several(engines)) == 1 and not re.match(r"[\w-]+=", alone[0]):
        return {DEFAULT_PATH: alone[0]}
    return by_name(engines, "URL", "gpu=http://localhost:8000")


def _of_engines(names: list[str], given: Any, option: str, example: str, parse: Callable[[Any], Any]) -> dict[str, Any]:
    """Values by engine. Raises WrongUsage for a name that no engine has."""
    values = by_name(given, option, example)
    for name in values:
        if name not in names:
            raise WrongUsage(f"there is no engine {name!r}", where=option, remedy=f"Take {', '.join(names)}.")
    return {name: parse(value) for name, value in values.items()}


async def _run(live: Any, front: "Front", request: ServeRequest, drain_s: float, how: str) -> Served:
    def announce(server: Any) -> None:
        if request.ready:
            request.ready(f"Serving on {server.url} by {how}")

    await front.router.start()  # compiling and a collection of garbage take seconds: they end before it listens
    try:
        with live.short_pauses():
            async with live.FrontServer(front, request.host, request.port, drain_s=drain_s) as server:
                url, whole = server.url, await server.run(announce)
    finally:
        await front.router.close(0.0)
    if not whole:
        raise Interrupted(
            "stopped before all that was taken had ended",
            where=url,
            remedy="What ran was cut off, what waited was told; --drain gives it more time.",
        )
    router = front.router
    counts = {name: getattr(router, name) for name in ("submitted", "refused", "done", "failed", "cancelled")}
    return Served(url, counts, {path.name: path.batches for path in router.paths})


def _reply_ms(path: ExecutionPath, lengths: str, slots: int) -> float:
    """A step with the whole prompt, then a step for each further token, in batches as large as there are slots."""
    drawn = parse_lengths(lengths).lengths(4096, np.random.default_rng(0))
    prompt, output = (float(np.mean(each)) for each in drawn)
    first = PathLatency(path, prompt).typical_ms(np.ones(1))
    further = PathLatency(path, 1, prompt + output / 2).typical_ms(np.array([float(slots)]))
    return float(first[0] + (output - 1) * further[0])


def _check_classes(names: Sequence[str] | None) -> tuple[str, ...]:
    """Raises WrongUsage for names that no header can hold, or that order nothing."""
    classes = tuple(names or ())
    if any(not re.fullmatch(r"[\w.-]{1,64}", each, re.ASCII) for each in classes) or len(set(classes)) < len(classes):
        raise WrongUsage(
            f"{', '.join(map(repr, classes))} are no different names",
            where="--class",
            remedy="Give each class a name of its own, of letters, digits, '.', '_' and '-'.",
        )
    if len(classes) == 1:
        raise WrongUsage("one class alone orders nothing", where="--class", remedy="Give two, the most urgent first.")
    return classes


def _make_policy(name: str, names: list[str], times_ms: Mapping[str, float], settings: Settings) -> Policy:
    """Of batches of one request. Raises WrongUsage."""
    if name not in FRONT_POLICIES:
        raise WrongUsage(
            f"policy {name!r} does nothing here: engines form their batches themselves",
            where="--policy",
            remedy=f"Take one of {', '.join(FRONT_POLICIES)}.",
        )
    lacking = [each for each in names if each not in times_ms]
    if name != "gpu-only" and lacking:
        raise WrongUsage(
            f"policy {name} goes by the time of a reply, which is not known of {' and '.join(lacking)}",
            where="--times",
            remedy=f"Give it (--times {lacking[0]}=800ms), or --hardware with a fit of that name.",
        )
    main, *side = (np.array([times_ms.get(each, UNKNOWN_MS)]) for each in names)
    return named_policy(name, 1.0, PathTimes(main, side[0]) if side else PathTimes(main), settings)


def _keep(policy: Policy, rate: float, system: System) -> Policy:
    """Keep a T_cut that was given, whatever times are learned."""
    return policy


def _check_token(text: str) -> str:
    """Raises WrongUsage for what no header can hold, or anybody can guess; the token itself is never told."""
    if len(text) < MIN_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", text):
        raise WrongUsage(
            "a token is too short, or has letters that a header cannot hold",
            where="token",
            remedy=f"Take {MIN_TOKEN} or more visible ASCII letters.",
        )
    return text


def _token_in(file: Path) -> str:
    """The token that is all of a file. Raises WrongUsage."""
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise WrongUsage(f"cannot be read: {why}", where=str(file), remedy="Name a file with a token.") from None


def _describe(rule: Policy, slots: Mapping[str, int], times_ms: Mapping[str, float]) -> str:
    """`three-stage: gpu (8 slots, 800 ms a reply), cpu (2 slots, 3 s a reply); T_cut 800 ms`"""
    replies = {name: f", {format_ms(each)} a reply" for name, each in times_ms.items()}
    paths = [f"{name} ({count_text(count, 'slot')}{replies.get(name, '')})" for name, count in slots.items()]
    cut_ms = rule.settings.get("t_cut_ms")
    return f"{rule.name}: {', '.join(paths)}{'' if cut_ms is None else f'; T_cut {format_ms(cut_ms)}'}"
