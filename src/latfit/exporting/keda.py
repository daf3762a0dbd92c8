"""A plan's schedule of replicas as a ScaledObject of KEDA, whose cron triggers ask for them day by day.

KEDA hands each trigger's number to a HorizontalPodAutoscaler, which takes the largest and looks every 15 s. Cron knows
minutes and days, so a part of the day begins at the minute before and ends at the minute after, and a schedule of more
than a day is none. The day's first replicas are asked for by the start-up time before it begins, as all others are.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo, available_timezones

from latfit.errors import WrongUsage
from latfit.exporting.facts import PlanFacts, Timetable
from latfit.exporting.files import Setting
from latfit.exporting.reasons import commented
from latfit.exporting.text import comment, yaml_text
from latfit.units import format_percent, number

DAY_MINUTES, DAY_S, MINUTE_S = 1440, 86_400.0, 60.0
MIDNIGHT = "00:00 UTC"
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?: ([A-Za-z][\w+/-]*))?")
TOLERANCE = 0.1
"""Relative changes up to which the autoscaler leaves the number as it is, unless its cluster says otherwise."""

AT_ONCE_S, STEADY_S = 15, 60


@dataclass(frozen=True)
class Clock:
    """When a recorded day begins: minutes after midnight in a time zone."""

    minute: int
    zone: str


def clock_of(text: str | None) -> Clock:
    """`06:30 Europe/Berlin`; midnight UTC where nobody said. Raises WrongUsage."""
    found = CLOCK.fullmatch((MIDNIGHT if text is None else text).strip())
    zone = (found[3] or "UTC") if found else ""
    if found is None or not _is_zone(zone):
        raise WrongUsage(
            f"{text!r} is no time of a day",
            where="--begins",
            remedy="Write hours, minutes and a zone: 06:30 Europe/Berlin.",
        )
    return Clock(60 * int(found[1]) + int(found[2]), zone)


def _is_zone(name: str) -> bool:
    """Whether the time zone is one; where this machine has no list of them all are."""
    known = available_timezones()
    if not known:
        return True
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return False
    return name in known


@dataclass(frozen=True)
class Trigger:
    """So many replicas from a minute of the day on to another one, which may be of the next day."""

    start: int
    end: int
    replicas: int

    def cron(self, minute: int) -> str:
        return f"{minute % 60} {minute // 60 % 24} * * *"


@dataclass(frozen=True)
class Day:
    """A timetable as a day of a cluster. least: replicas at any time; counts: one after the other; rest: of the time
    that was not recorded, 0 where all of the day was."""

    least: int
    counts: Sequence[int]
    triggers: Sequence[Trigger]
    rest: int

    @property
    def most(self) -> int:
        return max(self.counts)

    @property
    def small_steps(self) -> list[tuple[int, int]]:
        """Steps up, from how many to how many, that the autoscaler may leave out."""
        around = zip(self.counts, [*self.counts[1:], self.counts[0]], strict=True)
        return sorted({(a, b) for a, b in around if 0 < b - a <= TOLERANCE * a})


def too_long(found: Timetable) -> bool:
    """Whether it covers more than a day, which daily triggers cannot repeat."""
    return found.span_s > DAY_S


def day_of(found: Timetable, clock: Clock, fixed: int) -> Day:
    """The day's triggers. fixed: the replicas that are enough all the time, for what was not recorded."""
    whole = found.span_s + found.window_s >= DAY_S
    moments = [at for at, _ in found.asked]
    ends = [*moments[1:], DAY_S - found.start_up_s if whole else found.span_s]
    parts = [(at, end, count) for (at, count), end in zip(found.asked, ends, strict=True)]
    parts[0] = (-found.start_up_s, parts[0][1], parts[0][2])
    if not whole:
        parts.append((found.span_s, DAY_S - found.start_up_s, fixed))
    least = min(count for *_, count in parts)
    while any(count > least and end - start >= DAY_S - 2 * MINUTE_S for start, end, count in parts):
        least = min(count for *_, count in parts if count > least)
    triggers = [
        Trigger(clock.minute + math.floor(start / MINUTE_S), clock.minute + math.ceil(end / MINUTE_S), count)
        for start, end, count in parts
        if count > least and end > start
    ]
    inside = [Trigger(each.start % DAY_MINUTES, each.end % DAY_MINUTES, each.replicas) for each in triggers]
    return Day(least, [max(count, least) for *_, count in parts], inside, 0 if whole else fixed)


def schedule_notes(found: Timetable, day: Day, clock: Clock, begins: str | None) -> list[str]:
    """What the file's head says of the schedule."""
    begin = f"{clock.minute // 60:02d}:{clock.minute % 60:02d} {clock.zone}"
    told = [f"Assumed: the plan's recorded day begins at {begin}{'' if begins else ' (say another by --begins)'}."]
    saved = format_percent(100 * (1 - found.hours / found.fixed_hours)) if found.fixed_hours > 0 else ""
    if saved:
        told.append(
            f"The schedule takes {number(found.hours, 3)} replica-hours of the recording, {saved} less than a fixed"
            " number of them."
        )
    if day.rest:
        covered = f"{number(found.span_s / 3600, 3)} h"
        told.append(
            f"! Only {covered} were recorded: the rest of the day has the {day.rest} replicas of the whole load."
        )
    if day.small_steps:
        steps = ", ".join(f"from {a} to {b}" for a, b in day.small_steps[:3])
        told.append(
            f"! The autoscaler leaves a change of up to 10 % out ({steps}): lower its tolerance"
            " (--horizontal-pod-autoscaler-tolerance) where the targets need it."
        )
    return told


def scaled_object(facts: PlanFacts, name: str, day: Day, clock: Clock) -> list[str]:
    """The object's lines, for the Deployment of that name."""
    assert facts.timetable is not None
    ahead = f"asked for {number(facts.timetable.start_up_s, 3)} s ahead, which an engine takes to start"
    settings = [
        Setting("minReplicaCount", day.least, "The fewest replicas that any part of the day needs."),
        Setting("maxReplicaCount", day.most, "The most that any part of it needs."),
    ]
    lines = ["apiVersion: keda.sh/v1alpha1", "kind: ScaledObject", "metadata:", f"  name: {yaml_text(name)}", "spec:"]
    lines += ["  scaleTargetRef:", f"    name: {yaml_text(name)}"]
    for each in settings:
        lines += [*commented(each, facts, "  "), f"  {each.name}: {each.value}"]
    lines += _behaviour(day)
    lines.append("  triggers:")
    for trigger in day.triggers:
        why = f"The least replicas that keep the targets in this part of the day, {ahead}."
        lines += commented(Setting("desiredReplicas", trigger.replicas, why), facts, "    ")
        lines += [
            "    - type: cron",
            "      metadata:",
            f"        timezone: {yaml_text(clock.zone)}",
            f"        start: {yaml_text(trigger.cron(trigger.start))}",
            f"        end: {yaml_text(trigger.cron(trigger.end))}",
            f"        desiredReplicas: {yaml_text(str(trigger.replicas))}",
        ]
    return lines


def _behaviour(day: Day) -> list[str]:
    indent = " " * 8
    return [
        "  advanced:",
        "    horizontalPodAutoscalerConfig:",
        "      behavior:",
        *comment("All at once: the plan's start-up time leaves no room for the autoscaler's own pace.", indent),
        "        scaleUp:",
        "          policies:",
        "            - type: Pods",
        f"              value: {day.most}",
        f"              periodSeconds: {AT_ONCE_S}",
        *comment("Not the default of 5 min, which would be paid; a minute bridges the change of triggers.", indent),
        "        scaleDown:",
        f"          stabilizationWindowSeconds: {STEADY_S}",
    ]
