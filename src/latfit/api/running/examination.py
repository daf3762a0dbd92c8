"""`examine_server`: what binds a running engine, and what would help it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from latfit.api.answer import Answer, State
from latfit.api.quantities import duration as in_ms
from latfit.api.request import verb
from latfit.api.requests import DoctorRequest, RunningEngine
from latfit.api.running.what_if import LEVEL, REPLICATIONS, Fitted, WhatIf, fitted_engine
from latfit.errors import BadInput, WrongUsage
from latfit.metrics import Diagnosis, Interval, Reading, Server, Unanswered, between, diagnose
from latfit.model import FitResult
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import TOLERANCE

EVERY_S = 1.0
FEWEST_READINGS = 2
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
    """A running engine over some seconds. diagnosis: what its counters prove; what_if: settings moved on a fitted
    engine, None without a fit; seen: from the first reading to the last.  gone: why there was none after that, empty
    where it answered to the end.  users: (requests at once, TPOT in ms) that the fit allows; None without a fit and a
    limit of TPOT.
    """

    server: str
    diagnosis: Diagnosis
    seen: Interval
    what_if: WhatIf | None = None
    gone: str = ""
    users: tuple[int, float] | None = None

    @property
    def verdict(self) -> str:
        """What binds, what is measured and what to do, in a line to quote."""
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
        """Bad where requests wait or it is gone, in doubt where nobody can tell why or nothing ran."""
        if not self.gone and self.diagnosis.binding in ("idle", "unknown"):
            return "doubt"
        return "good" if not self.gone and self.diagnosis.binding == "steps" else "bad"

    def _load(self) -> str:
        """The load and its mean times, in a line."""
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
        """The answer below the verdict."""
        gone = f"After {format_ms(1e3 * self.seen.seconds)} it {self.gone}; the figures are from before."
        lines = [*([gone] if self.gone else []), self.diagnosis.why]
        if self.diagnosis.binding == "idle":
            return lines
        speed = None if self.what_if is None else self.what_if.speed
        lines += [self._load(), *([speed.sentence] if speed is not None and speed.has_changed else [])]
        lines += [f"{each.setting}: {each.why}" for each in self.diagnosis.levers]
        return [*lines, *self._simulated()]

    def _simulated(self) -> list[str]:
        what_if = self.what_if
        if what_if is None:
            return ["To quantify a change: --fit FIT, which latfit record writes."]
        engine = what_if.engine
        unknown = [name for name in MOVED if what_if.believed and not engine.is_known(name)]
        settings = [*filter(None, [engine.setup.line]), *engine.unmeasured]
        settings += [note.sentence for note in engine.setup.notes if note.setting not in unknown]
        if not what_if.believed:
            return [f"No advice by the fit: {what_if.refusal}.", *settings]
        from latfit.reporting import stall_lines

        agreed = ", ".join(each.sentence for each in what_if.checks)
        tolerance, level = format_percent(100 * TOLERANCE), format_percent(100 * LEVEL)
        lines = [
            f"Simulated at this load and speed (ranges: {level} of {REPLICATIONS} runs):",
            *_changes(what_if),
            *stall_lines(what_if.stalls),
            f"The simulation matches the server within {tolerance}: {agreed}.",
        ]
        if unknown:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
            lines.append(f"Not varied, as unknown: {', '.join(unknown)}. {options} sets it.")
        return [*lines, *settings]

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit doctor URL --json`."""
        about = {"server": self.server, "verdict": self.verdict, "gone": self.gone or None}
        return {**about, **self.diagnosis.to_json(), "simulated": self.what_if and _simulated_json(self.what_if)}


def _changes(what_if: WhatIf) -> list[str]:
    """A line for each change that does something, and one for those that do nothing."""
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
    server, given = Server(request.url or ""), limits_of(request)
    wanted_s = in_ms(request.duration, "--duration") / 1e3
    readings, gone = _of_one_run(server, min(EVERY_S, wanted_s / 2), wanted_s, request.progress)
    if len(readings) < FEWEST_READINGS:
        raise BadInput("stopped answering, or started again", where=str(server), remedy="Try again once it is up.")
    facts = {**server.settings(), **readings[-1].state.facts}
    check_limit(request.max_num_seqs, readings)
    seen, diagnosis = between(readings[0], readings[-1]), diagnose(readings, {**facts, **given})
    if request.fit is None and request.hardware is None:
        return Examination(str(server), diagnosis, seen, gone=gone)
    engine = engine_of(seen, diagnosis, facts, request)
    what_if = WhatIf(engine, readings, slo_of(request), request.seed, request.at_measured_speed)
    return Examination(str(server), diagnosis, seen, what_if, gone, _users(engine.fits[0], slo_of(request)[1]))


def _users(fit: FitResult, tpot_ms: float) -> tuple[int, float] | None:
    """How many requests decode together within a TPOT, of those that were measured; None without a limit."""
    if not math.isfinite(tpot_ms):
        return None
    B = np.arange(1.0, fit.largest_batch + 1)
    within = np.flatnonzero(fit.latency_ms(B, B) <= tpot_ms)
    return (int(within[-1]) + 1 if len(within) else 0), tpot_ms


def limits_of(request: RunningEngine) -> dict[str, Any]:
    """The limits of an engine that a request names."""
    limits = {"max_num_seqs": request.max_num_seqs, "max_num_batched_tokens": request.max_num_batched_tokens}
    return _without_none(limits)


def check_limit(max_num_seqs: int | None, readings: Sequence[Reading]) -> None:
    """Raises WrongUsage for a sequence limit below what runs."""
    most = max((each.state.running / each.state.engines for each in readings), default=0.0)
    if max_num_seqs is not None and most > max_num_seqs:
        raise WrongUsage(
            f"{max_num_seqs:,} is not the engine's limit: {number(most)} requests ran at once",
            where="--max-num-seqs",
            remedy="Give it as the engine has it, or leave it out.",
        )


def engine_of(seen: Interval, diagnosis: Diagnosis, facts: Mapping[str, Any], request: RunningEngine) -> Fitted:
    """The engine that was read, as fits know it. facts: its settings, as far as it tells them."""
    queries, hits = seen.count("prefix_queries"), seen.count("prefix_hits")
    given = {
        "kv_blocks": request.kv_blocks,
        "block_size": request.block_size,
        "synchronous": request.synchronous,
        "prefix_hit_rate": hits / queries if queries > 0 and 0 < hits < queries else None,
    }
    fits = (request.fit, request.prefill_fit, request.hardware)
    settings = {**limits_of(request), **_without_none(given)}
    return fitted_engine(*fits, diagnosis, {**facts, **seen.last.facts}, settings)


def slo_of(request: RunningEngine) -> tuple[float, float]:
    """Limits of TTFT and TPOT in ms, infinite without."""
    ttft, tpot = (
        math.inf if limit is None else in_ms(limit, option)
        for limit, option in ((request.ttft, "--ttft"), (request.tpot, "--tpot"))
    )
    return ttft, tpot


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _of_one_run(
    server: Server, every_s: float, wanted_s: float, progress: Callable[[float, float], None] | None
) -> tuple[list[Reading], str]:
    """Readings up to where the server started again, and why there are none behind them, empty where there are."""
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
