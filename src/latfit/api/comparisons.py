"""Runs side by side: where one has become slower than the first, phase by phase and by regions of (B, S)."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from latfit.api.answer import Answer, State
from latfit.api.fits import Fit, as_fit, fit, fit_each, names_a_fit
from latfit.api.quantities import percent
from latfit.api.reading import read
from latfit.api.request import shared, verb
from latfit.api.requests import CompareRequest, FitEachRequest, ReadRequest, Time
from latfit.api.upgrades import Upgrade, compare_plans
from latfit.errors import BadInput, FitNotUsable, WrongUsage
from latfit.fitting import (
    Change,
    Measured,
    PhaseChange,
    RegionChange,
    Verdict,
    change_over_starts,
    changes_between,
)
from latfit.messages import Message, note
from latfit.model import FitResult, fitted_identity
from latfit.trace import check_one_system, facts_beside, row_weights
from latfit.units import format_percent, number

if TYPE_CHECKING:
    from latfit.reporting import Table

NAMED = 3
"""Regions that a verdict names."""
FEWEST = 8
"""Steps below which a source is no run to compare."""
RECORDED_RUN = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
"""How a recorder of steps names a start of an engine."""
MIN_STARTS = 2
"""Runs a side that show how much starts differ."""


@dataclass(frozen=True)
class Compared:
    """One run compared with the baseline. source: its name.  system: what people call it, where several are compared.
    change: what was found.  differs: what the two systems differ in, in words.  one_start_each: whether both are single
    runs of different starts of an engine, so that a change may be the machine's."""

    source: str
    change: Change
    system: str = ""
    differs: Sequence[str] = ()
    one_start_each: bool = False

    @property
    def name(self) -> str:
        return f"{self.source} ({self.system})" if self.system else self.source

    def verdict(self, tolerance_pct: float) -> Verdict:
        """Verdict of `Change`; two single starts cannot show that the code is slower or faster."""
        found = self.change.verdict(tolerance_pct)
        return "unclear" if self.one_start_each and found in ("slower", "faster") else found

    def sentence(self, baseline: str, tolerance_pct: float) -> str:
        """The verdict, and where it became slower or faster."""
        verdict = self.verdict(tolerance_pct)
        direction, where = _places(self.change, tolerance_pct)
        if self.one_start_each and verdict == "unclear":
            return (
                f"Not separable: {direction} in {where}. {self.name} and {baseline} are one start each, so this may be"
                " the machine or the code."
            )
        found = {
            "unclear": "not confirmed to be as fast as",
            "slower": "slower than",
            "slower within tolerance": "slower within the tolerance than",
            "faster": "faster than",
            "as fast": "as fast as",
        }
        named = f" in {where}" if verdict in ("slower", "faster") else ""
        return f"{self.name} is {found[verdict]} {baseline}{named}."

    def basis(self, tolerance_pct: float) -> str:
        """What the verdict stands on, in a sentence or two."""
        by_steps = [phase for phase in self.change.phases if phase.by == "steps"]
        by_fits = [phase.phase for phase in self.change.phases if phase.by == "fits"]
        told = []
        if by_steps:
            ours, theirs, cells = (
                sum(getattr(phase.whole, name) for phase in by_steps) for name in ("steps", "baseline_steps", "cells")
            )
            told.append(f"{ours:,} steps with {theirs:,} in {cells:,} common cells")
        if by_fits:
            told.append(f"{', '.join(by_fits)} by predictions of the fits")
        tests = len(self.change.tested)
        missing = self.change.only_in_one
        more = f" Not in both runs: {', '.join(missing)}." if missing else ""
        starts = ""
        if self.change.starts is not None and self.change.start_sd_pct is not None:
            first, other = self.change.starts
            spread = format_percent(self.change.start_sd_pct)
            starts = f" {first} and {other} starts; starts differ by {spread} (standard deviation)."
        return (
            f"Compared {'; '.join(told)}. Tolerance {format_percent(tolerance_pct)}, {tests} phases and regions"
            f" tested.{starts}{more}"
        )

    def to_json(self, tolerance_pct: float) -> dict[str, Any]:
        overall = self.change.overall
        return {
            "source": self.source,
            "system": self.system,
            "verdict": self.verdict(tolerance_pct),
            "one_start_each": self.one_start_each,
            "starts": None if self.change.starts is None else list(self.change.starts),
            "start_sd_pct": self.change.start_sd_pct,
            "phases": [_phase_json(phase, tolerance_pct) for phase in self.change.phases],
            "overall": None if overall is None else _phase_json(overall, tolerance_pct),
            "only_in_one": list(self.change.only_in_one),
            "differs": list(self.differs),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Compared":
        overall = document.get("overall")
        change = Change(
            [_phase(each) for each in document["phases"]],
            document["only_in_one"],
            None if overall is None else _phase(overall),
            None if document.get("starts") is None else tuple(document["starts"]),
            document.get("start_sd_pct"),
        )
        apart = document.get("one_start_each", False)
        return cls(document["source"], change, document["system"], document["differs"], apart)


@dataclass(frozen=True, repr=False)
class Comparison(Answer):
    """Runs beside the first, the baseline, where both have measured.

    names: of the sources, the baseline first.  compared: each other one, by system where several are compared.
    tolerance_pct: a slowdown from which it is a regression.  alone: systems that not every source holds.  fits: of the
    sources, where they are at hand.  upgrades: a load planned with each, where one is given.
    """

    names: Sequence[str]
    compared: Sequence[Compared]
    tolerance_pct: float
    alone: Sequence[str] = ()
    fits: Sequence[Fit] = field(default=(), compare=False)
    upgrades: Sequence[Upgrade] = ()

    @property
    def baseline(self) -> str:
        return self.names[0]

    @property
    def verdicts(self) -> list[str]:
        """slower, slower within tolerance, faster, as fast or unclear, of each but the baseline."""
        return [each.verdict(self.tolerance_pct) for each in self.compared]

    @property
    def slower(self) -> list[str]:
        """Names of those that are slower by more than the tolerance, in one phase or region at least."""
        pairs = zip(self.compared, self.verdicts, strict=True)
        return [each.name for each, verdict in pairs if verdict == "slower"]

    @property
    def states(self) -> list[State]:
        """bad: a regression.  doubt: it cannot be told.  Of each but the baseline."""
        states: dict[str, State] = {"slower": "bad", "unclear": "doubt"}
        return [states.get(verdict, "good") for verdict in self.verdicts]

    @property
    def state(self) -> State:
        return min(self.states, key=("bad", "doubt", "good").index)

    @property
    def verdict(self) -> str:
        return " ".join(self.sentences)

    @property
    def lines(self) -> list[str]:
        return [*self.basis, *self.load_lines]

    @property
    def load_lines(self) -> list[str]:
        """What each change means for the load."""
        return [line for each in self.upgrades for line in each.sentences(self.baseline)]

    @property
    def messages(self) -> list[Message]:
        return list(map(note, self.notes))

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """The changes of each; then the fits side by side."""
        from latfit.reporting import changes_table, comparison_table

        found = [changes_table(each.name, each.change, self.tolerance_pct, brief=brief) for each in self.compared]
        if not brief and self.fits:
            found.append(comparison_table(self.names, [each.result for each in self.fits]))
        return [*found, *(each.table() for each in self.upgrades if each.changes)]

    @property
    def sentences(self) -> list[str]:
        """The verdict on each but the baseline, with the change by phase and its interval."""
        return [each.sentence(self.baseline, self.tolerance_pct) for each in self.compared]

    @property
    def basis(self) -> list[str]:
        """What each verdict stands on."""
        return [each.basis(self.tolerance_pct) for each in self.compared]

    @property
    def notes(self) -> list[str]:
        """What the systems differ in, and what was not compared."""
        differ: dict[str, list[str]] = {}
        for each in self.compared:
            if each.differs:
                differ.setdefault("; ".join(each.differs), []).append(each.name)
        found = [f"The systems differ ({', '.join(names)}): {told}." for told, names in differ.items()]
        if any(each.one_start_each and each.verdict(self.tolerance_pct) == "unclear" for each in self.compared):
            found.append("Measure both in turn, twice or more, and compare all: latfit compare A B A2 B2 --alternate.")
        return found + [f"Not in every source, not compared: {', '.join(self.alone)}."] * bool(self.alone)

    @property
    def table(self) -> Any:
        """DataFrame: a row for each phase and region, with its change in percent, its interval and verdict."""
        import pandas as pd

        rows = []
        for each in self.compared:
            for phase in each.change.parts:
                for region in phase.tested:
                    facts = _region_json(region, self.tolerance_pct)
                    (low_B, high_B), (low_S, high_S) = facts.pop("B"), facts.pop("S")
                    ends = {"B_low": low_B, "B_high": high_B, "S_low": low_S, "S_high": high_S}
                    where = "phase" if region is phase.whole else "region"
                    rows.append(
                        {"source": each.name, "phase": phase.phase, "of": where, "by": phase.by, **ends, **facts}
                    )
        return pd.DataFrame(rows).set_index("source")

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit compare --json`."""
        return {
            "baseline": self.baseline,
            "sources": list(self.names[1:]),
            "tolerance_pct": self.tolerance_pct,
            "compared": [each.to_json(self.tolerance_pct) for each in self.compared],
            "alone": list(self.alone),
            "upgrades": [each.to_json() for each in self.upgrades],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Comparison":
        """The comparison in a decoded document, without the fits."""
        compared = [Compared.from_json(each) for each in document["compared"]]
        names = [document["baseline"], *document["sources"]]
        upgrades = [Upgrade.from_json(each) for each in document.get("upgrades", ())]
        return cls(names, compared, document["tolerance_pct"], document["alone"], upgrades=upgrades)


def _phase_json(phase: PhaseChange, tolerance_pct: float) -> dict[str, Any]:
    return {
        "phase": phase.phase,
        "by": phase.by,
        **_region_json(phase.whole, tolerance_pct),
        "verdict": phase.verdict(tolerance_pct),
        "regions": [_region_json(region, tolerance_pct) for region in phase.regions],
    }


def _phase(document: Mapping[str, Any]) -> PhaseChange:
    regions = [_region(region) for region in document["regions"]]
    return PhaseChange(document["phase"], document["by"], _region(document), regions)


def _region_json(region: RegionChange, tolerance_pct: float) -> dict[str, Any]:
    facts = asdict(region)
    return {**facts, "B": list(region.B), "S": list(region.S), "verdict": region.verdict(tolerance_pct)}


def _region(document: Mapping[str, Any]) -> RegionChange:
    facts = {name: document[name] for name in RegionChange.__dataclass_fields__}
    return RegionChange(**{**facts, "B": tuple(facts["B"]), "S": tuple(facts["S"])})


def _places(change: Change, tolerance_pct: float) -> tuple[Literal["slower", "faster"], str]:
    """Return the phases and regions that are slower by more than the tolerance, else the phases that are faster."""
    slower = [_place(region, phase) for phase in change.phases for region in phase.slower(tolerance_pct)]
    if change.overall is not None:
        slower += [_place(region, change.overall) for region in change.slower_across(tolerance_pct)]
    if slower:
        more = f" and {len(slower) - NAMED} more" if len(slower) > NAMED else ""
        return "slower", ", ".join(slower[:NAMED]) + more
    return "faster", ", ".join(each.phase for each in change.phases if each.verdict(tolerance_pct) == "faster")


def _place(region: RegionChange, phase: PhaseChange) -> str:
    """`decode`, or `mixed at B 16 to 64`."""
    if region is phase.whole:
        return phase.phase
    ends = [("B", region.B, phase.whole.B), ("S", region.S, phase.whole.S)]
    if region.B == region.S:
        ends = ends[:1]
    parts = [
        f"{name} {number(own[0])}" + f" to {number(own[1])}" * (own[1] > own[0])
        for name, own, whole in ends
        if own != whole
    ]
    return f"{phase.phase} at {', '.join(parts)}" if parts else f"part of {phase.phase}"


@verb(CompareRequest)
def compare_runs(request: CompareRequest) -> Comparison:
    """Compare runs with the first one, phase by phase and by regions of (B, S).

    sources: two or more fits, fit files, or whatever `latfit.fit` takes. Steps are compared in the cells that both
    runs have measured, where steps are at hand, else by the fits. With `alternate` intervals hold the variance
    between starts. With a load and its SLO, `upgrades` says what each change means for it. Raises WrongUsage,
    FitNotUsable; BadInput where the runs have no common range.
    """
    sources, names, path, seed = request.sources, request.names, request.path, request.seed
    tolerance, each, alternate = request.tolerance, request.each, request.alternate
    tolerance_pct = percent(tolerance, "--tolerance")
    if not tolerance_pct >= 0:
        raise WrongUsage(f"a tolerance of {tolerance_pct:g} %", where="--tolerance", remedy="Give 0 or more.")
    if len(sources) < 2:
        raise WrongUsage("one fit has nothing to be compared with", remedy="Name two or more.")
    shown = list(names or (_name(source, i) for i, source in enumerate(sources, start=1)))
    if len(shown) != len(sources):
        raise WrongUsage(f"{len(shown)} names for {len(sources)} fits", where="--names", remedy="Give a name for each.")
    if path and "{" in path and not each:
        raise WrongUsage(f"{path!r} names several paths", where="--path", remedy="Add --each.")
    if alternate and (len(sources) < 2 * MIN_STARTS or len(sources) % 2):
        raise WrongUsage(
            f"{len(sources)} runs are not {MIN_STARTS} or more a side",
            where="--alternate",
            remedy="Name them in turn: A B A2 B2.",
        )
    if not each:
        fits = _alike(sources, lambda source, time: [_one(source, path, seed, time, request)])
        first, *others = [found for (found,) in fits]
        if alternate:
            return _over_starts(shown, [first, *others], tolerance_pct)
        pairs = [(name, "", first, other) for name, other in zip(shown[1:], others, strict=True)]
        comparison = _compared(shown, pairs, tolerance_pct, [], [first, *others])
        if request.rate is None:
            return comparison
        return replace(comparison, upgrades=compare_plans(request, shown, [first, *others]))
    systems = _alike(sources, lambda source, time: _each(source, path, seed, time, request))
    pairs, alone = _matched(shown, systems, by_path=bool(path and "{" in path))
    return _compared(shown, pairs, tolerance_pct, alone, [])


def compare(*sources: Any, **options: Any) -> Comparison:
    return compare_runs(sources=sources, **options)


_own = inspect.signature(compare_runs)
compare.__doc__ = compare_runs.__doc__
compare.__signature__ = _own.replace(  # type: ignore[attr-defined]
    parameters=[
        inspect.Parameter("sources", inspect.Parameter.VAR_POSITIONAL),
        *(each for each in _own.parameters.values() if each.name != "sources"),
    ]
)


def _over_starts(names: Sequence[str], fits: Sequence[Fit], tolerance_pct: float) -> Comparison:
    """Runs of two sides in turn, the baseline's first. Raises WrongUsage for two runs of one start."""
    for (one, first), (two, other) in combinations(zip(names, fits, strict=True), 2):
        if one == two or _starts(first) & _starts(other):
            raise WrongUsage(
                f"{one} and {two} are of one start",
                where="--alternate",
                remedy="Start the engine anew for each run; parts of one start show no variance between starts.",
            )
    runs = [Measured.of(found.result, found.rows()) for found in fits]
    change = change_over_starts(runs[::2], runs[1::2])
    sides = [f"{side[0]} and {len(side) - 1} more" for side in (names[::2], names[1::2])]
    return Comparison(
        sides, [Compared(sides[1], change, "", _differences(fits[0], fits[1]))], tolerance_pct, [], list(fits)
    )


def _are_one_start_each(first: Fit, other: Fit) -> bool:
    """Whether recorders say that two runs are of different starts of an engine."""
    starts = [_starts(found) for found in (first, other)]
    return all(starts) and not starts[0] & starts[1]


def _starts(found: Fit) -> set[str]:
    """The starts of engines that recorders named in the steps of a fit, or in the provenance that it keeps of them."""
    rows = found.rows()
    named = [] if rows is None or "run" not in rows else list(rows.coded("run")[1])
    provenance = found.result.provenance.get("trace") or {}
    if provenance.get("made_by") == "latfit profile":
        return set()  # its processes are repeats of one measurement
    parts = provenance.get("parts")
    kept = parts.values() if isinstance(parts, Mapping) else [provenance]
    named += [each for part in kept for each in (part.get("run"), *part.get("runs", ()))]
    return {str(each) for each in named if RECORDED_RUN.fullmatch(str(each))}


Pair = tuple[str, str, Fit, Fit]
"""Name of a source, label of a system, the baseline's fit and the source's."""


def _compared(
    names: Sequence[str], pairs: Sequence[Pair], tolerance_pct: float, alone: Sequence[str], fits: Sequence[Fit]
) -> Comparison:
    measured = {id(found): Measured.of(found.result, found.rows()) for pair in pairs for found in pair[2:]}
    changes = changes_between([(measured[id(first)], measured[id(other)]) for _, _, first, other in pairs])
    found = [
        Compared(name, change, system, _differences(first, other), _are_one_start_each(first, other))
        for (name, system, first, other), change in zip(pairs, changes, strict=True)
    ]
    return Comparison(names, found, tolerance_pct, alone, fits)


def _alike(sources: Sequence[Any], fitted: Callable[[Any, Time | None], list[Fit]]) -> list[list[Fit]]:
    """The fits of each source, all of the same time: that of the fits that are there, else the period where every
    source knows it. Raises BadInput where two fits differ in it."""
    there = {found.time for source in sources if _is_fit(source) for found in fitted(source, None)}
    time: Time | None = there.pop() if len(there) == 1 else None
    if there:
        raise BadInput(
            "one fit is of the period of a step, another of the engine's own time",
            remedy="Fit both with the same --time.",
        )
    found = [fitted(source, time) for source in sources]
    if len({each.time for fits in found for each in fits}) > 1:
        found = [fitted(source, "compute") for source in sources]
    return found


def _one(source: Any, path: str | None, seed: int, time: Time | None, given: CompareRequest) -> Fit:
    """The fit of a source of one system, of the path that is asked for where it holds several."""
    if _is_fit(source):
        return as_fit(source)
    reading = shared(ReadRequest, given, source=source)
    steps = read.of(reading)
    paths = steps.trace.coded("path")[1] if "path" in steps.trace else []
    if path and any(paths) and path not in paths:
        found = f"{steps.name} has no path {path!r}"
        raise BadInput(found, where="--path", remedy=f"There are: {', '.join(sorted(filter(None, paths)))}.")
    if path and len(paths) > 1:
        where = " and ".join(filter(None, [reading.where and f"({reading.where})", f"path == {path!r}"]))
        steps = read.of(replace(reading, where=where))
    check_one_system(steps, "Compare one of them with --where, or each with the same one of the others with --each.")
    if len(steps.trace) < FEWEST and row_weights(steps.trace) is None:
        found = "one step" if len(steps.trace) == 1 else f"{len(steps.trace)} steps"
        remedy = "Compare runs that hold several steps in each of several cells (B, S)."
        raise BadInput(f"{found} cannot be compared: a fit needs more", where=steps.name, remedy=remedy)
    return fit(steps, seed=seed, path=path, time=time)


def _each(source: Any, path: str | None, seed: int, time: Time | None, given: CompareRequest) -> list[Fit]:
    """A usable fit of every system of a source."""
    if _is_fit(source):
        return [as_fit(source)]
    found = fit_each.of(shared(FitEachRequest, given, source=source, time=time))
    usable = [each for each in found.values() if each.ok]
    if not usable:
        status = next(iter(found.values())).result.status
        raise FitNotUsable(status.sentence, remedy=status.remedy)
    return usable


def _matched(names: Sequence[str], systems: Sequence[Sequence[Fit]], *, by_path: bool) -> tuple[list[Pair], list[str]]:
    """Systems of each source with the same one of the baseline, and the labels of those without one."""
    keys = [{_key(found, by_path=by_path): found for found in each} for each in systems]
    pairs = [
        (name, _label(key), keys[0][key], found)
        for name, own in zip(names[1:], keys[1:], strict=True)
        for key, found in own.items()
        if key in keys[0]
    ]
    if not pairs:
        listed = " vs ".join("; ".join(_label(key) or "unnamed" for key in list(own)[:NAMED]) for own in keys)
        raise BadInput(
            f"no system is in two sources: {listed}",
            remedy="Compare one of each with --where, or say by which columns they are the same with --path, such as"
            " '{model}-tp{tp}'.",
        )
    everywhere = set.intersection(*(set(own) for own in keys))
    alone = sorted({_label(key) for own in keys for key in own if key not in everywhere})
    return pairs, alone


Key = tuple[tuple[str, str], ...]


def _key(found: Fit, *, by_path: bool) -> Key:
    """What a system is known by: hardware, model, tp and path, or the path that its columns name."""
    if by_path:
        return (("path", found.path or ""),)
    known = {**fitted_identity(found.result), **found.system}
    return tuple((name, known[name]) for name in ("hardware", "model", "tp", "path") if known.get(name))


def _label(key: Key) -> str:
    """What people call a system."""
    return ", ".join(value for _, value in key)


def _differences(first: Fit, other: Fit) -> list[str]:
    """What two systems differ in: `hardware: a100 vs h100`, the baseline first."""
    facts = facts_beside(fitted_identity(first.result), fitted_identity(other.result))
    return [
        f"{fact.name.replace('_', ' ')}: {fact.fitted} vs {fact.found}" for fact in facts if fact.agreement == "differs"
    ]


def _is_fit(source: Any) -> bool:
    return isinstance(source, Fit | FitResult) or names_a_fit(source)


def _name(source: Any, position: int) -> str:
    if isinstance(source, str | Path):
        return str(source)
    path = source.path if isinstance(source, Fit) else None
    return f"{path} ({position})" if path else f"fit {position}"
