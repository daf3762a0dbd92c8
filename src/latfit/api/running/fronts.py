"""`serve`: the router as an HTTP front of running engines; `replay`: a policy driven live on this machine."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from latfit import live, reporting
from latfit.api.answer import Answer, PlainAnswer, State
from latfit.api.hardware import DEFAULT_PATH, profile_of
from latfit.api.quantities import by_name, count, duration as in_ms, percent, rates, several
from latfit.api.request import option_of, verb
from latfit.api.requests import FrontPolicy, ReplayRequest, ServeRequest
from latfit.errors import HardwareMissing, Interrupted, WrongUsage, refuse
from latfit.hardware import ExecutionPath, PathLatency
from latfit.live import Router, RouterOptions
from latfit.policies import POLICIES, PathTimes, Policy, Settings, named_policy
from latfit.units import count_text, format_ms, format_percent, parse_bytes
from latfit.workload import parse_lengths

if TYPE_CHECKING:
    from pandas import DataFrame

    from latfit.live import Front
    from latfit.simulation import System

SLOTS = 8
OVERDUE, MIN_OVERDUE_S = 20.0, 1.0  # T(1) that a caller waits without a byte until its leaving shows a hung engine
MIN_TOKEN = 8  # letters
UNKNOWN_MS = 1000.0  # T(1) if none is given, for policies that do not use it
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPEN = " No token is set: anyone who can reach this host can send requests."


@verb(ServeRequest)
def serve(request: ServeRequest) -> PlainAnswer:
    """Pass each request on to one of several running engines, until SIGTERM or SIGINT.

    Raises WrongUsage, BadInput, HardwareMissing, TargetNotWritable; Interrupted where requests were cut off.
    """
    try:
        _ = live.FrontServer, live.Front
    except ImportError as error:
        remedy = "Install it: pip install 'latfit[live]'."
        raise HardwareMissing(f"{error.name} is not installed", where="latfit serve", remedy=remedy) from None
    engines, classes = request.engines, tuple(request.classes or ())
    if not isinstance(engines, Mapping) and len(alone := several(engines)) == 1 and not re.match(r"[\w-]+=", alone[0]):
        engines = {DEFAULT_PATH: alone[0]}
    urls = by_name(engines, "URL", "gpu=http://localhost:8000")
    if any(not re.fullmatch(r"[\w.-]{1,64}", each, re.ASCII) for each in classes) or len(set(classes)) < len(classes):
        remedy = "Give each class another name, of letters, digits, '.', '_' and '-'."
        raise WrongUsage(f"{', '.join(map(repr, classes))} are not distinct names", where="--class", remedy=remedy)
    names = list(urls)
    if not 1 <= len(names) <= 2:
        raise WrongUsage(f"{len(names)} engines", where="URL", remedy="Give one or two, the main path first.")
    token = request.token
    if request.token_file is not None:
        try:
            token = request.token_file.read_text("ascii").strip()
        except (OSError, UnicodeError) as error:
            where, remedy = str(request.token_file), "Name a file with a token."
            raise WrongUsage(f"cannot be read: {error}", where=where, remedy=remedy) from None
    token = token and _check_token(token)
    bearer = request.engine_token and _check_token(request.engine_token)
    times = {name: in_ms(text, "--times") for name, text in by_name(request.times, "--times", "gpu=800ms").items()}
    given = {name: count(text, "--slots", "gpu=8") for name, text in by_name(request.slots, "--slots", "gpu=8").items()}
    if unknown := next((name for name in {**times, **given} if name not in names), None):
        remedy = f"Take {', '.join(names)}."
        raise WrongUsage(f"there is no engine {unknown!r}", where="--times, --slots", remedy=remedy)
    slots = {name: given.get(name, SLOTS) for name in names}
    if request.hardware is not None:
        paths = profile_of(request.hardware).paths
        times = {name: reply_ms(paths[name], request.lengths, slots[name]) for name in names if name in paths} | times
    # One request is a batch for the main path (B1 = 1); T_cut by default is T(1) then, whatever the rate.
    settings = Settings(
        t_cut_ms=None if request.t_cut is None else in_ms(request.t_cut, "--t-cut"),
        B1=1,
        ageing_ms=math.inf if request.ageing is None else in_ms(request.ageing, "--ageing"),
    )
    rule = front_policy(request.policy or ("three-stage" if len(names) > 1 else "gpu-only"), names, times, settings)
    waits = {"connect": request.connect, "first_byte": request.first_byte, "between": request.between}
    timeouts = live.HttpTimeouts(*(in_ms(value, option_of(ServeRequest, name)) / 1e3 for name, value in waits.items()))
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    t_ms = {name: times.get(name, UNKNOWN_MS) for name in names}
    overdue_s = {name: max(OVERDUE * time_ms / 1e3, MIN_OVERDUE_S) for name, time_ms in t_ms.items()}
    executors = [
        live.HttpExecutor(name, urls[name], slots[name], timeouts, overdue_s=overdue_s[name], headers=headers)
        for name in names
    ]
    limits = RouterOptions(
        most_waiting=request.most_waiting, timeout_ms=math.inf, deadlines_ms=(math.inf,) * max(len(classes), 1)
    )
    options = live.FrontOptions(
        token or None,
        int(parse_bytes(request.max_body, option="--set max_body")),
        int(parse_bytes(request.max_memory, option="--set max_memory")),
        classes=classes,
    )
    front = live.Front(Router(executors, [[each] for each in t_ms.values()], rule, limits), options)
    if request.learn:
        learner = live.Learner(front.router, thresholds=None if request.t_cut is None else lambda policy, *_: policy)
        front.registry.register(live.LearnerMetrics(learner))
    with suppress(ImportError):  # where OpenTelemetry is, whatever its own settings make of spans
        live.RequestSpans(front.router)
    aged = f", {format_ms(settings.ageing_ms)} of waiting worth one class" if math.isfinite(settings.ageing_ms) else ""
    ordered = f"; {' before '.join(classes)}{aged}" if classes else ""
    how = f"{describe_policy(rule, slots, times)}{ordered}.{'' if token or request.host in LOOPBACK else OPEN}"
    drain_s = in_ms(request.drain, "--drain", zero=True) / 1e3
    return asyncio.run(_run(front, request, drain_s, how))


def reply_ms(path: ExecutionPath, lengths: str, slots: int) -> float:
    """Return the time of a step with the prompt and of one for each further token, in full batches."""
    drawn = parse_lengths(lengths).lengths(4096, np.random.default_rng(0))
    prompt, output = (float(np.mean(each)) for each in drawn)
    first = PathLatency(path, prompt).typical_ms(np.ones(1))
    further = PathLatency(path, 1, prompt + output / 2).typical_ms(np.array([float(slots)]))
    return float(first[0] + (output - 1) * further[0])


def front_policy(name: str, names: list[str], times_ms: Mapping[str, float], settings: Settings) -> Policy:
    """Return a policy for batches of one request. Raises WrongUsage."""
    found = f"engines form their batches themselves, without {name!r}"
    possible = get_args(FrontPolicy)
    refuse(name not in possible, found, "--policy", f"Take one of {', '.join(possible)}.")
    lacking = [each for each in names if each not in times_ms]
    found = f"{name} needs the time of a reply of {' and '.join(lacking)}"
    remedy = f"Give it (--times {''.join(lacking[:1])}=800ms), or --hardware with a fit of that name."
    refuse(name != "gpu-only" and bool(lacking), found, "--times", remedy)
    main, *side = (np.array([times_ms.get(each, UNKNOWN_MS)]) for each in names)
    return named_policy(name, 1.0, PathTimes(main, side[0]) if side else PathTimes(main), settings)


def describe_policy(rule: Policy, slots: Mapping[str, int], times_ms: Mapping[str, float]) -> str:
    """`three-stage: gpu (8 slots, 800 ms a reply), cpu (2 slots, 3 s a reply); T_cut 800 ms`"""
    replies = {name: f", {format_ms(each)} a reply" for name, each in times_ms.items()}
    paths = [f"{name} ({count_text(count, 'slot')}{replies.get(name, '')})" for name, count in slots.items()]
    cut_ms = rule.settings.get("t_cut_ms")
    return f"{rule.name}: {', '.join(paths)}{'' if cut_ms is None else f'; T_cut {format_ms(cut_ms)}'}"


async def _run(front: "Front", request: ServeRequest, drain_s: float, how: str) -> PlainAnswer:
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
        remedy = "Running requests were cut off; --drain gives them more time."
        raise Interrupted("stopped before all accepted requests had ended", where=url, remedy=remedy)
    router = front.router
    counts = {name: getattr(router, name) for name in ("submitted", "refused", "done", "failed", "cancelled")}
    batches = {path.name: path.batches for path in router.paths}
    by = ", ".join(f"{count:,} to {name}" for name, count in batches.items())
    others = "; ".join(f"{counts[name]:,} {name}" for name in ("failed", "refused", "cancelled") if counts[name])
    verdict = f"Served {count_text(counts['done'], 'request')} ({by}){'; ' if others else ''}{others}."
    state: State = "doubt" if counts["failed"] or counts["refused"] else "good"
    shown = reporting.table.Shown(verdict, state)
    return PlainAnswer({"url": url, "requests": counts, "batches": batches}, shown)


def _check_token(text: str) -> str:
    """Raise WrongUsage without showing the token."""
    if len(text) < MIN_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", text):
        remedy = f"Take {MIN_TOKEN} or more visible ASCII letters."
        raise WrongUsage("it is too short, or has letters that a header cannot hold", where="token", remedy=remedy)
    return text


LOADS = ("50%", "70%")


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Answer):
    runs: Sequence[live.Compared]
    system: "System"

    @property
    def agrees(self) -> bool | None:
        """Whether every run is as predicted; None if runs were disturbed."""
        outcomes = [run.agrees for run in self.runs]
        return False if False in outcomes else None if None in outcomes else True

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        counted = [run for run in self.runs if run.agrees is not None]
        disturbed = len(self.runs) - len(counted)
        more = f" {disturbed} more were disturbed by others." if disturbed else ""
        verdict = f"{sum(run.agrees is True for run in counted)} of {len(counted)} runs went as predicted.{more}"
        if not counted:
            most = format_percent(100 * max(run.others_share for run in self.runs))
            verdict = f"Cannot tell: others used up to {most} of the cores. Repeat it while they rest."
        return reporting.table.Shown(
            verdict,
            "good" if self.agrees else "bad" if self.agrees is False else "doubt",
            [note for run in self.runs for note in run.notes],
            brief=[reporting.brief.replay_table(self.runs, brief=True)],
            tables=[reporting.brief.replay_table(self.runs)],
        )

    @property
    def frame(self) -> "DataFrame":
        """DataFrame: a row a run."""
        import pandas as pd

        return pd.json_normalize([run.to_json() for run in self.runs], sep="_")

    def to_json(self) -> dict[str, Any]:
        return {"agrees": self.agrees, "verdict": self.verdict, "runs": [run.to_json() for run in self.runs]}


@verb(ReplayRequest)
def replay(request: ReplayRequest) -> Replay:
    """Send Poisson arrivals to executors on this machine under each policy, and compare with their simulation.

    Without executors decode steps of `model` run in two processes. Raises WrongUsage, BadInput, HardwareMissing.
    """
    names = _parts(request.policy)
    for name in names:
        refuse(name not in POLICIES, f"policy {name!r} is not known", "--policy", f"One of {', '.join(POLICIES)}.")
    per_ms = rates(_parts(request.rate) or None)
    loads = LOADS if request.load is None else _parts(request.load)
    shares = [] if per_ms else [percent(each, "--load") / 100 for each in loads]
    wrong = any(not 0 < share < 1 for share in shares)
    refuse(wrong, "a load must be above 0 % and below 100 %", "--load", "Give such as 70%.")
    launch_ms = in_ms(request.launch, "--set launch", zero=True)
    lasts_s = in_ms(request.duration_each, "--duration") / 1000
    none = not names or not (per_ms or shares)
    refuse(none, "no policy or no load", "--policy, --load", "Give one of each at least.")
    executors = request.executors
    executors = live.stand_ins(request.model, launch_ms, request.max_batch) if executors is None else list(executors)
    few = len(executors) < 1 + any(POLICIES[name].needs_side for name in names)
    remedy = "Give the main path, and the side path for a policy that needs one."
    refuse(few, f"{len(executors)} executors for {', '.join(names)}", "executors", remedy)

    loaded: dict[str, Any] = {"shares": shares, "rates_per_ms": per_ms, "lasts_s": lasts_s, "seed": request.seed}
    return Replay(*live.precisely(live.run_policies(executors, names, **loaded, progress=request.progress)))


def _parts(given: Any) -> list[Any]:
    return [part for each in several(given) for part in (each.split(",") if isinstance(each, str) else [each])]
