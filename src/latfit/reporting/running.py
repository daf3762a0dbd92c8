"""A running engine in words."""

import math
from collections.abc import Mapping

from latfit.metrics import Buckets, Diagnosis, Interval
from latfit.planning import LEVEL, REPLICATIONS, WhatIf
from latfit.profiling import Inventory
from latfit.reporting.serving import stall_text
from latfit.reporting.table import Shown
from latfit.units import format_bytes, format_ms, format_percent, format_rate, number
from latfit.validation import TOLERANCE, PhaseSpeed

FEW = 20  # requests below which a 99th percentile is the slowest of them

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
"""What to do, by bottleneck."""
VARIED = ("max_num_seqs", "max_num_batched_tokens", "kv_blocks")
"""Settings that a what-if varies if their value is known."""


def load_line(diagnosis: Diagnosis) -> str:
    means = diagnosis.figures
    parts = []
    if math.isfinite(means["arrived_per_s"]):
        parts.append(f"{format_rate(means['arrived_per_s'])} arriving")
    if math.isfinite(means["prompt_tokens"]):
        parts.append(f"{number(means['prompt_tokens'], 3)} in / {number(means['output_tokens'], 3)} out tokens")
    if math.isfinite(means["generated_per_s"]):
        parts.append(f"{number(means['generated_per_s'], 3)} output tokens/s")
    if math.isfinite(means["T_ms"]):
        parts.append(f"step {format_ms(means['T_ms'])} at B = {number(means['B'], 3)}, S = {number(means['S'], 3)}")
    times = {"TTFT": means["ttft_ms"], "queueing": means["queue_ms"], "TPOT": means["tpot_ms"]}
    parts += [f"{name} {format_ms(value)}" for name, value in times.items() if math.isfinite(value)]
    return f"Means of {number(means['seconds'], 3)} s: {', '.join(parts) or 'nothing was counted'}."


def what_if_lines(what_if: WhatIf | None) -> list[str]:
    if what_if is None:
        return ["To quantify a change: --fit FIT, which latfit record writes."]
    engine = what_if.engine
    unknown = [name for name in VARIED if what_if.believed and not engine.setup.is_known(name)]
    settings = [*filter(None, [engine.setup.line]), *engine.unmeasured]
    settings += [note.sentence for note in engine.setup.notes if note.setting not in unknown]
    if not what_if.believed:
        return [f"No advice by the fit: {what_if.refusal}.", *settings]
    agreed = ", ".join(each.sentence for each in what_if.checks)
    tolerance, level = format_percent(100 * TOLERANCE), format_percent(100 * LEVEL)
    lines = [
        f"Simulated at this load and speed (ranges: {level} of {REPLICATIONS} runs):",
        *_changes(what_if),
        *([] if what_if.stalls is None else [f"Stall: {stall_text(what_if.stalls)}."]),
        f"The simulation matches the server within {tolerance}: {agreed}.",
    ]
    if unknown:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        lines.append(f"Not varied, as unknown: {', '.join(unknown)}. {options} sets it.")
    return [*lines, *settings]


def _changes(what_if: WhatIf) -> list[str]:
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


def show_machine(found: Inventory) -> Shown:
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
    missing = [each for each in found.features if not each.ready]
    lines += [f"  missing: {each.name}. {each.remedy}" for each in missing]
    why = [f"  {each.name}: {each.missing}." for each in missing]
    verdict = f"{len(ready)} of {len(found.features)} features are ready on this machine."
    return Shown(verdict, lines=lines, details=["Why features are missing:", *why])


def window_lines(
    diagnosis: Diagnosis,
    seen: Interval,
    times: Mapping[str, tuple[Buckets | None, float]],
    capacity: tuple[float, str],
    speed: PhaseSpeed | None,
) -> list[str]:
    """times: histogram and limit in ms by title. capacity: requests/s within the SLO, or NaN and why."""
    figures, now, (capacity_per_s, unknown) = diagnosis.figures, seen.last, capacity
    cache, requests = "KV cache use unknown", "requests not counted"
    if math.isfinite(figures["kv_usage"]):
        cache = f"KV cache at most {format_percent(100 * figures['kv_usage'])} full"
    if not math.isnan(figures["arrived_per_s"]):
        arrived, finished = (format_rate(figures[name]) for name in ("arrived_per_s", "finished_per_s"))
        requests = f"{arrived} arrived, {finished} completed"
    tokens = [f"{number(figures[name], 3)}/s" for name in ("prefill_per_s", "generated_per_s")]
    carried = unknown
    if not math.isnan(capacity_per_s):
        used = format_percent(100 * figures["arrived_per_s"] / capacity_per_s)
        carried = f"{format_rate(capacity_per_s, down=True)} of such requests within the SLO; {used} used"
    helps = [f"{each.setting}: {each.why}" for each in diagnosis.levers if each.effect == "helps"]
    none = "none would help; only faster steps or less load would"
    return [
        f"last {number(figures['seconds'], 3)} s: {requests}; tokens {tokens[0]} in, {tokens[1]} out",
        f"now: {number(now.running)} running, {number(now.waiting)} waiting; {cache}",
        *(_tail_line(title, *each) for title, each in times.items()),
        f"limit: {diagnosis.why}",
        *([f"speed: {speed.sentence}"] if speed is not None and speed.has_changed else []),
        f"capacity: {carried}",
        f"setting: {[*helps, none if diagnosis.binding == 'steps' else 'the counters do not show one'][0]}",
    ]


def _tail_line(title: str, found: Buckets | None, limit: float) -> str:
    if found is None:
        return f"{title}: no request in this time"
    p99 = " to ".join(format_ms(edge) for edge in found.bucket(0.99))
    few = f" (of {number(found.count)})" if found.count < FEW else ""
    seen = f"{title}: mean {format_ms(found.mean)}, p99 {p99}{few}"
    if not math.isfinite(limit):
        return seen
    low, high = (format_percent(100 * share) for share in found.share_within(limit))
    more = "" if low == high else f" to {high} (exact in recorded steps: latfit trace show FILES)"
    return f"{seen}; within {format_ms(limit)}: {low}{more}"
