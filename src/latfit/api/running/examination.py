"""`examine_server`: what binds a running engine and what would help; `examine_machine`: what a machine lacks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from latfit import reporting
from latfit.api.answer import Answer, PlainAnswer, State
from latfit.api.engines import engine_costs, engine_settings_of, named_settings
from latfit.api.quantities import duration as in_ms, limit
from latfit.api.request import verb
from latfit.api.requests import DoctorRequest, RunningEngine
from latfit.errors import BadInput, WrongUsage
from latfit.metrics import Diagnosis, Interval, Reading, Server, Unanswered, between, diagnose
from latfit.planning import LEVEL, REPLICATIONS, UNLIMITED, Fitted, WhatIf
from latfit.profiling import inventory
from latfit.simulation import USUAL_SETTINGS
from latfit.units import format_bytes, format_ms, format_percent, format_rate, number
from latfit.validation import TOLERANCE

EVERY_S = 1.0
MIN_READINGS = 2
BINDING = {
    "idle": "is idle",
    "sequences": "is limited by max_num_seqs",
    "kv_cache": "is limited by its KV cache",
    "token_budget": "is limited by max_num_batched_tokens",
    "steps": "is not held back by any limit",
    "unknown": "has an unexplained queue",
}
REMEDY = {
    "sequences": "raise max_num_seqs",
    "kv_cache": "give it more KV cache",
    "token_budget": "raise max_num_batched_tokens",
}
"""What to do, by what binds."""


@dataclass(frozen=True, repr=False, eq=False)
class Examination(Answer):
    """A running engine over some seconds.

    diagnosis: what its counters prove.  seen: from the first reading to the last.  what_if: settings moved on a fitted
    engine, None without a fit.  gone: why the readings ended early, else empty.  users: (requests at once, TPOT in ms)
    that the fit allows, None without a fit or a limit of TPOT.
    """

    server: str
    diagnosis: Diagnosis
    seen: Interval
    what_if: WhatIf | None = None
    gone: str = ""
    users: tuple[int, float] | None = None

    @property
    def verdict(self) -> str:
        """What binds, what was measured and what to do, in a line to quote."""
        found, told = self.diagnosis, self.diagnosis.figures
        parts = [f"{found.engine} at {self.server} {BINDING[found.binding]}"]
        if found.binding != "idle" and math.isfinite(told["running"] + told["tpot_ms"]):
            parts.append(f"{number(told['running'], 2)} requests at once at {format_ms(told['tpot_ms'])} TPOT")
        if self.users is not None:
            parts.append(f"up to {self.users[0]:,} within {format_ms(self.users[1])}")
        if self.diagnosis.growing:
            parts.append("add replicas")
        elif found.binding in REMEDY:
            parts.append(REMEDY[found.binding])
        return f"{'; '.join(parts)}."

    @property
    def state(self) -> State:
        """Bad if a limit binds or the engine is gone, in doubt if it is idle or the cause unknown."""
        states: dict[str, State] = {"idle": "doubt", "unknown": "doubt", "steps": "good"}
        return "bad" if self.gone else states.get(self.diagnosis.binding, "bad")

    def _describe_load(self) -> str:
        """Return the load and its mean times."""
        told = self.diagnosis.figures
        parts = []
        if math.isfinite(told["arrived_per_s"]):
            parts.append(f"{format_rate(told['arrived_per_s'])} arriving")
        if math.isfinite(told["prompt_tokens"]):
            parts.append(f"{number(told['prompt_tokens'], 3)} in / {number(told['output_tokens'], 3)} out tokens")
        if math.isfinite(told["generated_per_s"]):
            parts.append(f"{number(told['generated_per_s'], 3)} output tokens/s")
        if math.isfinite(told["T_ms"]):
            parts.append(f"step {format_ms(told['T_ms'])} at B = {number(told['B'], 3)}, S = {number(told['S'], 3)}")
        times = {"TTFT": told["ttft_ms"], "queueing": told["queue_ms"], "TPOT": told["tpot_ms"]}
        parts += [f"{name} {format_ms(value)}" for name, value in times.items() if math.isfinite(value)]
        return f"Means of {number(told['seconds'], 3)} s: {', '.join(parts) or 'nothing was counted'}."

    @property
    def lines(self) -> list[str]:
        gone = f"After {format_ms(1e3 * self.seen.seconds)} it {self.gone}; the figures are from before."
        lines = [*([gone] if self.gone else []), self.diagnosis.why]
        if self.diagnosis.binding == "idle":
            return lines
        speed = None if self.what_if is None else self.what_if.speed
        lines += [self._describe_load(), *([speed.sentence] if speed is not None and speed.has_changed else [])]
        lines += [f"{each.setting}: {each.why}" for each in self.diagnosis.levers]
        return [*lines, *self._simulated()]

    def _simulated(self) -> list[str]:
        what_if = self.what_if
        if what_if is None:
            return ["To quantify a change: --fit FIT, which latfit record writes."]
        engine = what_if.engine
        unknown = [name for name in MOVED if what_if.believed and not engine.setup.is_known(name)]
        settings = [*filter(None, [engine.setup.line]), *engine.unmeasured]
        settings += [note.sentence for note in engine.setup.notes if note.setting not in unknown]
        if not what_if.believed:
            return [f"No advice by the fit: {what_if.refusal}.", *settings]
        agreed = ", ".join(each.sentence for each in what_if.checks)
        tolerance, level = format_percent(100 * TOLERANCE), format_percent(100 * LEVEL)
        lines = [
            f"Simulated at this load and speed (ranges: {level} of {REPLICATIONS} runs):",
            *_changes(what_if),
            *([] if what_if.stalls is None else [f"Stall: {reporting.stall_text(what_if.stalls)}."]),
            f"The simulation matches the server within {tolerance}: {agreed}.",
        ]
        if unknown:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
            lines.append(f"Not varied, as unknown: {', '.join(unknown)}. {options} sets it.")
        return [*lines, *settings]

    def to_json(self) -> dict[str, Any]:
        about = {"server": self.server, "verdict": self.verdict, "gone": self.gone or None}
        return {**about, **self.diagnosis.to_json(), "simulated": self.what_if and _simulated_json(self.what_if)}


def _changes(what_if: WhatIf) -> list[str]:
    """Return a line for each change with an effect, and one for all others."""
    lines: list[str] = []
    without_effect: dict[str, list[str]] = {}
    for change in what_if.changes:
        present = f"{change.setting} {number(getattr(what_if.engine.settings, change.setting))}"
        effect = change.effect(what_if.now)
        if effect == "nothing":
            without_effect.setdefault(present, []).append(number(change.value))
        else:
            lines.append(f"  {present} -> {number(change.value)} {effect}: {change.compared(what_if.now)}")
    if without_effect:
        listed = "; ".join(f"{present} -> {' or '.join(values)}" for present, values in without_effect.items())
        lines.append(f"  no effect: {listed}")
    return lines


def _simulated_json(what_if: WhatIf) -> dict[str, Any]:
    changes = what_if.changes if what_if.believed else ()
    return {
        "now": None if what_if.load is None else what_if.now.to_json(),
        "speed": what_if.speed and asdict(what_if.speed),
        "believed": what_if.believed,
        "refusal": what_if.refusal or None,
        "checks": [each.to_json() for each in what_if.checks],
        "changes": [{**each.to_json(), "effect": each.effect(what_if.now)} for each in changes],
        "stalls": what_if.stalls.to_json() if what_if.believed and what_if.stalls is not None else None,
        "settings_from": dict(what_if.engine.setup.origin),
        "notes": [*what_if.engine.unmeasured, *(each.sentence for each in what_if.engine.setup.notes)],
    }


MOVED = ("max_num_seqs", "max_num_batched_tokens", "kv_blocks")
"""Settings that are moved where they are known."""


@verb(DoctorRequest)
def examine_server(request: DoctorRequest) -> Examination:
    """Find what binds a running engine, which setting would help, and which would do nothing.

    Counters alone prove what binds. With a fit the load that was read is simulated with settings moved, where the
    simulation of the readings agrees with what the server measured. Raises WrongUsage, BadInput, FitNotUsable.
    """
    server, slo = Server(request.url or ""), slo_of(request)
    wanted_s = in_ms(request.duration, "--duration") / 1e3
    readings, gone = _read_one_run(server, min(EVERY_S, wanted_s / 2), wanted_s, request.progress)
    if len(readings) < MIN_READINGS:
        raise BadInput("stopped answering, or started again", where=str(server), remedy="Try again once it is up.")
    facts = {**server.settings(), **readings[-1].state.facts}
    check_limit(request.max_num_seqs, readings)
    seen, diagnosis = between(readings[0], readings[-1]), diagnose(readings, {**facts, **named_settings(request)})
    if request.fit is None and request.hardware is None:
        return Examination(str(server), diagnosis, seen, gone=gone)
    fitted = fitted_engine(request, seen, diagnosis, facts)
    what_if = WhatIf(fitted, readings, slo, request.seed, request.at_measured_speed)
    users = None
    if math.isfinite(slo[1]):
        B = np.arange(1.0, fitted.fits[0].largest_batch + 1)
        within = np.flatnonzero(fitted.fits[0].latency_ms(B, B) <= slo[1])
        users = (int(within[-1]) + 1 if len(within) else 0), slo[1]
    return Examination(str(server), diagnosis, seen, what_if, gone, users)


def fitted_engine(request: RunningEngine, seen: Interval, diagnosis: Diagnosis, facts: Mapping[str, Any]) -> Fitted:
    """Return the engine that was read, with the costs of the request's fit. facts: settings that the server publishes.

    Raises BadInput, FitNotUsable, WrongUsage.
    """
    costs, unmeasured, _, fits = engine_costs(request, scatter=True)
    server, given = {**facts, **seen.last.facts}, named_settings(request)
    if diagnosis.binding == "sequences" and "max_num_seqs" not in diagnosis.limits:
        server["max_num_seqs"] = round(diagnosis.figures["running_most"] / diagnosis.engines)
    if 0 < seen.count("prefix_hits") < seen.count("prefix_queries"):
        given["prefix_hit_rate"] = seen.count("prefix_hits") / seen.count("prefix_queries")
    setup = engine_settings_of(fits, server=server, usual={**USUAL_SETTINGS, "kv_blocks": UNLIMITED}, **given)
    found = Fitted(costs, setup, unmeasured, fits)
    queues = diagnosis.binding == "unknown" and "max_num_seqs" not in diagnosis.limits
    if queues and diagnosis.figures["running_most"] < found.settings.max_num_seqs * diagnosis.engines:
        limit = "no source tells the sequence limit"
        if found.setup.is_known("max_num_seqs"):
            limit = f"fewer run than the trace's limit of {found.settings.max_num_seqs:,}"
        return replace(found, impossible=f"Requests wait, and {limit}: give --max-num-seqs as the engine has it")
    return found


def check_limit(max_num_seqs: int | None, readings: Sequence[Reading]) -> None:
    """Raises WrongUsage for a sequence limit below what runs."""
    most = max((each.state.running / each.state.engines for each in readings), default=0.0)
    if max_num_seqs is not None and most > max_num_seqs:
        raise WrongUsage(
            f"{max_num_seqs:,} is not the engine's limit: {number(most)} requests ran at once",
            where="--max-num-seqs",
            remedy="Give it as the engine has it, or leave it out.",
        )


def slo_of(request: RunningEngine) -> tuple[float, float]:
    """Return the limits of TTFT and TPOT in ms, infinite without."""
    return limit(request.ttft, "--ttft"), limit(request.tpot, "--tpot")


def _read_one_run(
    server: Server, every_s: float, wanted_s: float, progress: Callable[[float, float], None] | None
) -> tuple[list[Reading], str]:
    """Return readings of one run of the server, and why they ended early, else an empty text."""
    found: list[Reading] = []
    gone = ""
    for told in server.readings(every_s, wanted_s):
        if isinstance(told, Unanswered):
            gone = str(told)
            continue
        if found and told.state.fell_below(found[0].state):
            return found, "started again"
        found.append(told)
        gone = ""
        if progress is not None:
            progress(told.t_s - found[0].t_s, wanted_s)
    return found, gone


def examine_machine() -> PlainAnswer:
    """Return what this machine has and lacks; nothing is measured and nothing heavy imported."""
    found = inventory()
    machine, isa = found.machine, found.isa
    usable = len(machine["affinity"] or [])
    shared = "" if usable == machine["cores"] else f", {usable} of them usable"
    quota = "" if machine["cpu_quota"] is None else f", a quota of {number(machine['cpu_quota'], 3)}"
    no_amx = f"; no AMX: {isa['amx']}" if isa["amx"] else ""
    memory, free = (format_bytes(size) if size else "unknown" for size in (machine["memory_bytes"], found.free_bytes))
    gpus = [f"{gpu.name}{f', {format_bytes(gpu.memory_bytes)}' if gpu.memory_bytes else ''}" for gpu in found.gpus]
    versions = [f"{name} {version}" for name, version in found.packages.items() if version]
    ready = [each.name for each in found.features if each.ready]
    lines = [
        f"CPU: {machine['cpu']}, {machine['cores']} cores{shared}{quota}.",
        f"Instructions: {', '.join(name for name, why in isa.items() if not why) or 'none known'}{no_amx}.",
        f"Memory: {memory}, {free} free. GPU: {'; '.join(gpus) or 'none found'}.",
        f"{machine['os']}, Python {machine['python']}; {', '.join(versions) or 'no extras installed'}.",
        f"  ready: {'; '.join(ready)}.",
    ]
    lines += [f"  missing: {each.name}: {each.missing}. {each.remedy}" for each in found.features if not each.ready]
    verdict = f"{len(ready)} of {len(found.features)} features are ready on this machine."
    return PlainAnswer(found, verdict, lines=lines)
