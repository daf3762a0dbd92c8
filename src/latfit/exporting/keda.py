"""A plan's schedule of replicas as cron triggers of KEDA's ScaledObject.

KEDA gives each trigger's number to a HorizontalPodAutoscaler, which takes the largest. Cron knows minutes and days, so
a part of the day begins at the minute before and ends at the minute after, and a schedule longer than a day has no
triggers. All replicas are asked for by the start-up time ahead, the day's first ones too.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from zoneinfo import available_timezones

from latfit.errors import WrongUsage
from latfit.exporting.files import Setting
from latfit.planning import SchedulePlan
from latfit.units import format_percent, number

DAY_MINUTES, DAY_S, MINUTE_S = 1440, 86_400.0, 60.0
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?: ([A-Za-z][\w+/-]*))?")
TOLERANCE = 0.1  # relative; the autoscaler ignores smaller changes, unless its cluster says otherwise


@dataclass(frozen=True)
class Clock:
    """Begin of a recorded day: minutes after midnight in a time zone."""

    minute: int
    zone: str


def parse_clock(text: str | None) -> Clock:
    """Read `06:30 Europe/Berlin`; None is midnight UTC. Raises WrongUsage."""
    found = CLOCK.fullmatch((text if text is not None else "00:00 UTC").strip())
    zone = (found[3] or "UTC") if found else ""
    known = available_timezones()  # empty on a machine without a list of them
    if found is None or (known and zone not in known):
        raise WrongUsage(
            f"{text!r} is no time of a day",
            where="--begins",
            remedy="Write hours, minutes and a zone: 06:30 Europe/Berlin.",
        )
    return Clock(60 * int(found[1]) + int(found[2]), zone)


@dataclass(frozen=True)
class Trigger:
    """Replicas from a minute of the day to another, which may be of the next day."""

    start: int
    end: int
    setting: Setting


@dataclass(frozen=True)
class Day:
    """A schedule as a day of a cluster. counts: replicas of its parts in order.  unrecorded: replicas of the time that
    was not recorded, 0 if all of the day was."""

    least: int
    counts: Sequence[int]
    triggers: Sequence[Trigger]
    unrecorded: int

    @property
    def most(self) -> int:
        return max(self.counts)

    @property
    def small_steps(self) -> list[tuple[int, int]]:
        """Steps up that the autoscaler may ignore."""
        around = zip(self.counts, [*self.counts[1:], self.counts[0]], strict=True)
        return sorted({(a, b) for a, b in around if 0 < b - a <= TOLERANCE * a})


def day_of(schedule: SchedulePlan, clock: Clock, fixed: int) -> Day:
    """The day's triggers. fixed: replicas that suffice all the time, for what was not recorded."""
    whole = schedule.span_s + schedule.window_s >= DAY_S
    starts = [-schedule.start_up_s, *(at for at, _ in schedule.replicas_at[1:])]
    ends = [*starts[1:], DAY_S - schedule.start_up_s if whole else schedule.span_s]
    parts = [(at, end, count) for at, end, (_, count) in zip(starts, ends, schedule.replicas_at, strict=True)]
    if not whole:
        parts.append((schedule.span_s, DAY_S - schedule.start_up_s, fixed))
    least = min(count for *_, count in parts)
    while any(count > least and end - start >= DAY_S - 2 * MINUTE_S for start, end, count in parts):
        least = min(count for *_, count in parts if count > least)
    ahead = f"asked for {number(schedule.start_up_s, 3)} s ahead, an engine's start-up time"
    why = f"The fewest replicas that meet the targets in this part of the day, {ahead}."
    triggers = [
        Trigger(
            (clock.minute + math.floor(start / MINUTE_S)) % DAY_MINUTES,
            (clock.minute + math.ceil(end / MINUTE_S)) % DAY_MINUTES,
            Setting("desiredReplicas", count, why),
        )
        for start, end, count in parts
        if count > least and end > start
    ]
    return Day(least, [max(count, least) for *_, count in parts], triggers, 0 if whole else fixed)


def schedule_remarks(schedule: SchedulePlan, day: Day, clock: Clock, begins: str | None) -> list[str]:
    """What the file's head says of the schedule."""
    begin = f"{clock.minute // 60:02d}:{clock.minute % 60:02d} {clock.zone}"
    found = [f"Assumed: the plan's recorded day begins at {begin}{'' if begins else ' (say another by --begins)'}."]
    if schedule.fixed.replica_hours > 0:
        saved = format_percent(100 * schedule.saved)
        hours = f"{number(schedule.replica_hours, 3)} replica-hours of the recording"
        found.append(f"The schedule takes {hours}, {saved} less than a fixed number of them.")
    if day.unrecorded:
        covered, rest = f"{number(schedule.span_s / 3600, 3)} h", f"the {day.unrecorded} replicas of the whole load"
        found.append(f"! Only {covered} were recorded: the rest of the day has {rest}.")
    if day.small_steps:
        steps = ", ".join(f"from {a} to {b}" for a, b in day.small_steps[:3])
        found.append(
            f"! The autoscaler ignores a change of up to 10 % ({steps}): lower its tolerance"
            " (--horizontal-pod-autoscaler-tolerance) where the targets need it."
        )
    return found
