"""`serve`: the router as an HTTP front before one or two running engines."""

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from latfit.simulation import Options, System, path_times, simulate
from latfit.units import format_ms, parse_bytes
from latfit.workload import OpenLoad, Poisson, parse_lengths

if TYPE_CHECKING:
    from latfit.live import Front

FRONT_POLICIES = ("gpu-only", "three-stage", "cutoff", "split")
"""Policies that mean something where every batch is one request: an engine forms its batches itself."""

SLOTS = 8
UNKNOWN_MS = 1000.0
"""T(1) where nobody says it and no rule goes by it."""

OVERDUE, LEAST_OVERDUE_S = 20.0, 1.0
"""A caller that leaves after so many times T(1), this long at least, without a reply having begun shows that an engine
hangs."""

CUTS = (0.0625, 0.125, 0.25, 0.5, 1.5, 2.0, 3.0, 5.0)
"""Queueing timeouts that a front that learns tries, over the main path's time of a reply."""

CUT_REQUESTS, CUT_WORTH = 10_000, 0.95
"""Requests of each simulation; the timeout in use stays where the best is not 5 % better."""

LEAST_TOKEN = 8
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
        told = [f"{self.counts[name]:,} {name}" for name in ("failed", "refused", "cancelled") if self.counts[name]]
        return f"Served {self.counts['done']:,} requests ({by}){'; ' if told else ''}{', '.join(told)}."

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
    live, urls = _live(), _addresses(request.engines)
    policy, hardware, lengths, token = request.policy, request.hardware, request.lengths, request.token
    t_cut, ageing, host, port, ready = request.t_cut, request.ageing, request.host, request.port, request.ready
    if request.token_file is not None:
        token = token_in(request.token_file)
    times = by_name(request.times, "--times", "gpu=800ms")
    slots = {name: count(each, "--slots", "gpu=8") for name, each in by_name(request.slots, "--slots", "gpu=8").items()}
    names = list(urls)
    if not 1 <= len(names) <= 2:
        raise WrongUsage(f"{len(names)} engines", where="URL", remedy="Give one or two, the main path first.")
    given = {name: in_ms(value, "--times") for name, value in _known(times, names, "--times").items()}
    counts = {**dict.fromkeys(names, SLOTS), **_known(slots, names, "--slots")}
    known = _times_ms(names, given, hardware, lengths, counts)
    cut_ms = None if t_cut is None else in_ms(t_cut, "--t-cut")
    ageing_ms = math.inf if ageing is None else in_ms(ageing, "--ageing")
    chosen = policy or ("three-stage" if len(names) > 1 else "gpu-only")
    # One request is a batch for the main path (B1 = 1); T_cut by default is T(1) then, whatever the rate.
    settings = Settings(t_cut_ms=cut_ms, B1=1, ageing_ms=ageing_ms)
    rule = _policy(chosen, names, known, settings)
    kinds = _classes(request.classes)
    waits = [in_ms(*each) / 1e3 for each in ((request.connect, "--connect"), (request.first_byte, "--first-byte"))]
    timeouts = live.HttpTimeouts(*waits, in_ms(request.between, "--between") / 1e3)
    bearer = request.engine_token
    headers = {} if bearer is None else {"Authorization": f"Bearer {_token(bearer)}"}
    t_ms = [known.get(name, UNKNOWN_MS) for name in names]
    overdue_s = [max(OVERDUE * each / 1e3, LEAST_OVERDUE_S) for each in t_ms]
    executors = [
        live.HttpExecutor(name, url, counts[name], timeouts, overdue_s=late, headers=headers)
        for (name, url), late in zip(urls.items(), overdue_s, strict=True)
    ]
    no_deadlines = (math.inf,) * max(len(kinds), 1)
    limits = RouterOptions(most_waiting=request.most_waiting, timeout_ms=math.inf, deadlines_ms=no_deadlines)
    options = live.FrontOptions(
        None if token is None else _token(token),
        int(parse_bytes(request.max_body, option="--max-body")),
        int(parse_bytes(request.max_memory, option="--max-memory")),
        classes=kinds,
    )
    front = live.Front(Router(executors, [[each] for each in t_ms], rule, limits), options)
    if request.learn:
        front.registry.register(live.LearnerMetrics(live.Learner(front.router, thresholds=_thresholds(settings))))
    with suppress(ImportError):  # where OpenTelemetry is, whatever its own settings make of spans
        live.RequestSpans(front.router)
    aged = f", {format_ms(ageing_ms)} of waiting worth one class" if math.isfinite(ageing_ms) else ""
    ordered = f"; {' before '.join(kinds)}{aged}" if kinds else ""
    told = f"{_in_words(rule, counts, known)}{ordered}.{'' if token or host in LOOPBACK else OPEN}"
    place = (host, port, in_ms(request.drain, "--drain", zero=True) / 1e3)
    return asyncio.run(_run(live, front, place, lambda url: ready(f"Serving on {url} by {told}") if ready else None))


def _addresses(engines: Any) -> dict[str, str]:
    """By name; one alone needs none. Raises WrongUsage."""
    if not isinstance(engines, Mapping) and len(alone := several(engines)) == 1 and not re.match(r"[\w-]+=", alone[0]):
        return {DEFAULT_PATH: alone[0]}
    return by_name(engines, "URL", "gpu=http://localhost:8000")


async def _run(live: Any, front: "Front", place: tuple[str, int, float], ready: Callable[[str], None]) -> Served:
    """place: host, port, seconds to drain."""
    host, port, drain_s = place
    await front.router.start()  # compiling and a collection of garbage take seconds: they end before it listens
    try:
        with live.short_pauses():
            async with live.FrontServer(front, host, port, drain_s=drain_s) as server:
                url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
                whole = await server.run(lambda _: ready(url))
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


def _live() -> Any:
    """The room with its front, which needs aiohttp. Raises HardwareMissing."""
    found = import_module("latfit.live")
    try:
        _ = found.FrontServer, found.Front
    except ImportError as error:
        raise HardwareMissing(
            f"{error.name} is not installed", where="latfit serve", remedy="Install it: pip install 'latfit[live]'."
        ) from None
    return found


def _known(given: Mapping[str, Any] | None, names: list[str], option: str) -> Mapping[str, Any]:
    """Raises WrongUsage for a name that no engine has."""
    for name in given or {}:
        if name not in names:
            raise WrongUsage(f"there is no engine {name!r}", where=option, remedy=f"Take {', '.join(names)}.")
    return given or {}


def _times_ms(
    names: list[str], given: Mapping[str, float], hardware: Any, lengths: str, slots: Mapping[str, int]
) -> dict[str, float]:
    """Typical time of a reply by path, as far as it is known. Raises WrongUsage, BadInput."""
    found = dict(given)
    if hardware is not None:
        paths = profile_of(hardware).paths
        for name in names:
            if name in paths and name not in found:
                found[name] = _reply_ms(paths[name], lengths, slots[name])
    return found


def _reply_ms(path: ExecutionPath, lengths: str, slots: int) -> float:
    """A step with the whole prompt, then a step for each further token, in batches as large as there are slots."""
    drawn = parse_lengths(lengths).lengths(4096, np.random.default_rng(0))
    prompt, output = (float(np.mean(each)) for each in drawn)
    first = PathLatency(path, prompt).typical_ms(np.ones(1))
    further = PathLatency(path, 1, prompt + output / 2).typical_ms(np.array([float(slots)]))
    return float(first[0] + (output - 1) * further[0])


def _classes(names: Sequence[str] | None) -> tuple[str, ...]:
    """Raises WrongUsage for names that no header can hold, or that order nothing."""
    found = tuple(names or ())
    if any(not re.fullmatch(r"[\w.-]{1,64}", each, re.ASCII) for each in found) or len(set(found)) < len(found):
        raise WrongUsage(
            f"{', '.join(map(repr, found))} are no different names",
            where="--class",
            remedy="Give each class a name of its own, of letters, digits, '.', '_' and '-'.",
        )
    if len(found) == 1:
        raise WrongUsage("one class alone orders nothing", where="--class", remedy="Give two, the most urgent first.")
    return found


def _policy(name: str, names: list[str], t_ms: Mapping[str, float], settings: Settings) -> Policy:
    """Of batches of one request. Raises WrongUsage."""
    if name not in FRONT_POLICIES:
        raise WrongUsage(
            f"policy {name!r} does nothing here: engines form their batches themselves",
            where="--policy",
            remedy=f"Take one of {', '.join(FRONT_POLICIES)}.",
        )
    lacking = [each for each in names if each not in t_ms]
    if name != "gpu-only" and lacking:
        raise WrongUsage(
            f"policy {name} goes by the time of a reply, which is not known of {' and '.join(lacking)}",
            where="--times",
            remedy=f"Give it (--times {lacking[0]}=800ms), or --hardware with a fit of that name.",
        )
    main, *side = (np.array([t_ms.get(each, UNKNOWN_MS)]) for each in names)
    times = PathTimes(main, side[0]) if side else PathTimes(main)
    return named_policy(name, 1.0, times, settings)


def _thresholds(settings: Settings) -> Callable[[Policy, float, System], Policy]:
    """T_cut for the times that were learnt, unless it was given: T(1), of cutoff the one of some whose simulated p99 is
    least."""

    def made(policy: Policy, rate: float, system: System) -> Policy:
        times = path_times(system)

        def at(t_cut_ms: float | None) -> Policy:
            return named_policy(policy.name, rate, times, replace(settings, t_cut_ms=t_cut_ms))

        usual = at(settings.t_cut_ms)
        if settings.t_cut_ms is not None or policy.name != "cutoff":  # three-stage with B1 = 1 hardly goes by it
            return usual
        load, options = OpenLoad(Poisson(rate)), Options(CUT_REQUESTS, replications=1)

        def p99_ms(candidate: Policy) -> float:
            return float(simulate(candidate, system, load, options).latency["p99"].value)

        tried = [usual, *(at(share * float(times.main[0])) for share in CUTS)]
        found = min(((p99_ms(each), each) for each in tried), key=lambda each: each[0])
        return found[1] if found[0] < CUT_WORTH * p99_ms(policy) else policy

    return made


def _token(text: str) -> str:
    """Raises WrongUsage for what no header can hold, or anybody can guess; the token itself is never told."""
    if len(text) < LEAST_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", text):
        raise WrongUsage(
            "a token is too short, or has letters that a header cannot hold",
            where="token",
            remedy=f"Take {LEAST_TOKEN} or more visible ASCII letters.",
        )
    return text


def token_in(file: Path) -> str:
    """The token that is all of a file. Raises WrongUsage."""
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise WrongUsage(f"cannot be read: {why}", where=str(file), remedy="Name a file with a token.") from None


def _in_words(rule: Policy, slots: Mapping[str, int], t_ms: Mapping[str, float]) -> str:
    """`three-stage: gpu (8 slots, 800 ms a reply), cpu (2 slots, 3 s a reply); T_cut 800 ms`"""
    replies = {name: f", {format_ms(each)} a reply" for name, each in t_ms.items()}
    paths = [
        f"{name} ({count} slot{'' if count == 1 else 's'}{replies.get(name, '')})" for name, count in slots.items()
    ]
    cut_ms = rule.settings.get("t_cut_ms")
    return f"{rule.name}: {', '.join(paths)}{'' if cut_ms is None else f'; T_cut {format_ms(cut_ms)}'}"
