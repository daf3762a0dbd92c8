"""The policy of a front: every batch is one request, by typical times of a reply."""

from collections.abc import Mapping

import numpy as np

from latfit.errors import refuse
from latfit.hardware import ExecutionPath, PathLatency
from latfit.policies import PathTimes, Policy, Settings, named_policy
from latfit.units import count_text, format_ms
from latfit.workload import parse_lengths

FRONT_POLICIES = ("gpu-only", "three-stage", "cutoff", "split")
"""Policies that mean something where every batch is one request: an engine forms its batches itself."""
UNKNOWN_MS = 1000.0  # T(1) if none is given, for policies that do not use it


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
    refuse(name not in FRONT_POLICIES, found, "--policy", f"Take one of {', '.join(FRONT_POLICIES)}.")
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
