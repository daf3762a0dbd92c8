"""Which column of a table is B, which S, which T: by the user's map, by latfit's names, or by names that say so.

Names are guessed only where one column fits and none has latfit's name. The unit of T comes from --unit, or from the
name (`latency_us`), or is milliseconds; a median that no step takes in that unit asks for --unit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.trace.readers.reader import Options
from latfit.trace.schema import REQUIRED
from latfit.trace.table import Array
from latfit.units import MS_PER_UNIT, format_ms

SYNONYMS = {
    "B": ("b", "batch", "batch_size", "num_reqs"),
    "S": ("s", "tokens", "num_tokens", "total_tokens"),
    "T_ms": ("t_ms",),
}
TIMED = re.compile(r"(?:latency|time|duration)(?:_(ns|us|µs|μs|ms|s))?")

SHORTEST_MS, LONGEST_MS = 0.005, 1e5
TYPICAL_MS = 20.0


@dataclass(frozen=True)
class Named:
    """Columns under latfit's names, the milliseconds that one unit of T is, and what was guessed."""

    columns: dict[str, Array]
    ms_per_unit: float
    guessed: Mapping[str, str]


def named_columns(found: Mapping[str, Array], options: Options, where: str) -> Named:
    """The columns with --map applied and obvious names understood. Raises BadInput where one is missing or unclear."""
    given = options.column_map
    missing = [theirs for theirs in given.values() if theirs not in found]
    if missing:
        raise BadInput(
            f"no column {', '.join(missing)} (there are {_listed(found)})",
            where=where,
            remedy="Correct --map, for example --map B=batch,S=tokens,T_ms=latency.",
        )
    guessed = _guessed(found, options, where)
    mapping = {**given, **guessed}
    taken = set(mapping.values()) | set(mapping)
    columns = {ours: found[theirs] for ours, theirs in mapping.items()}
    columns |= {name: column for name, column in found.items() if name not in taken}
    if lacking := [name for name in REQUIRED if name not in columns]:
        raise BadInput(
            f"no column {', '.join(lacking)} (there are {_listed(found)})",
            where=where,
            remedy="Say which columns they are, for example --map B=batch,S=tokens,T_ms=latency.",
        )
    unit = options.unit or _unit_in(guessed.get("T_ms", ""))
    return Named(columns, MS_PER_UNIT[unit or "ms"], guessed)


def check_unit(T_ms: Array, options: Options, where: str) -> None:
    """Raises BadInput where T is so short or long that its unit must be another, and none was given."""
    positive = T_ms[np.isfinite(T_ms) & (T_ms > 0)]
    if options.unit is not None or not len(positive):
        return
    median = float(np.median(positive))
    if SHORTEST_MS <= median <= LONGEST_MS:
        return
    likely = min(("s", "us", "ns"), key=lambda unit: abs(np.log(median * MS_PER_UNIT[unit] / TYPICAL_MS)))
    raise BadInput(
        f"the median step takes {format_ms(median)}: T looks like {likely}, not ms",
        where=where,
        remedy=f"Say its unit with --unit {likely}, or --unit ms if that is right.",
    )


def provenance_of(named: Named) -> dict[str, Any]:
    """What was guessed, for the record."""
    return {"column_map": dict(named.guessed)} if named.guessed else {}


def _guessed(found: Mapping[str, Array], options: Options, where: str) -> dict[str, str]:
    guessed = {}
    free = [name for name in found if name not in options.column_map.values()]
    for ours in REQUIRED:
        if ours in found or ours in options.column_map:
            continue
        candidates = [name for name in free if _fits(ours, name, options.unit)]
        if len(candidates) > 1:
            raise BadInput(
                f"{ours} may be any of the columns {', '.join(candidates)}",
                where=where,
                remedy=f"Say which with --map, for example --map {ours}={candidates[0]}.",
            )
        if candidates:
            guessed[ours] = candidates[0]
    _check_unit_agrees(guessed.get("T_ms", ""), options.unit, where)
    return guessed


def _fits(ours: str, name: str, unit: str | None) -> bool:
    plain = _plain(name)
    if plain in SYNONYMS[ours]:
        return True
    timed = TIMED.fullmatch(plain) if ours == "T_ms" else None
    return timed is not None and (timed.group(1) is not None or unit is not None)


def _check_unit_agrees(name: str, unit: str | None, where: str) -> None:
    told = _unit_in(name)
    if told and unit and MS_PER_UNIT[told] != MS_PER_UNIT[unit]:
        raise BadInput(
            f"the column {name} is in {told} by its name, but --unit says {unit}",
            where=where,
            remedy=f"Leave --unit out, or say that the name is wrong with --map T_ms={name}.",
        )


def _unit_in(name: str) -> str | None:
    plain = _plain(name)
    if plain in SYNONYMS["T_ms"]:
        return "ms"
    timed = TIMED.fullmatch(plain)
    return timed.group(1) if timed else None


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _listed(names: Mapping[str, Array]) -> str:
    shown = list(names)
    return ", ".join(shown[:12]) + (f", and {len(shown) - 12} more" if len(shown) > 12 else "")
