"""Compare runs with the first: changes by phase and by regions of (B, S)."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from latfit import reporting
from latfit.api.answer import Answer, State, data_frame
from latfit.api.fits import Fit, as_fit, check_usable, fit, fit_each, names_a_fit
from latfit.api.quantities import percent
from latfit.api.reading import read
from latfit.api.request import shared, verb
from latfit.api.requests import Clock, CompareRequest, EnginePlanRequest, FitEachRequest, ReadRequest
from latfit.api.serving import EnginePlan, plan_engine
from latfit.errors import BadInput, Regression, WrongUsage
from latfit.fitting import Compared, Measured, RegionChange, change_over_starts, changes_between
from latfit.messages import Message, note
from latfit.model import FitResult, fitted_identity
from latfit.planning import Reached, Upgrade, compare_steps
from latfit.records import Record
from latfit.trace import check_one_system, facts_beside, facts_of, row_weights
from latfit.units import format_percent

MAX_LABELS = 3  # systems named in an error
MAX_SLOWER = 8  # runs named in an error
MAX_IN_FULL = 2  # runs whose tables are shown; of more, verdicts alone
MAX_VERDICTS = 8
MIN_STEPS = 8  # below this a source is no run to compare
RECORDED_RUN = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")  # how a recorder of steps names a start of an engine
MIN_STARTS = 2  # runs a side that show the variance between starts

STATES: dict[str, State] = {"slower": "bad", "unclear": "doubt"}


class ComparisonRecord(Record, frozen=True):
    baseline: str
    sources: Sequence[str]
    tolerance_pct: float
    compared: Sequence[Compared]
    alone: Sequence[str] = ()
    upgrades: Sequence[Upgrade] = ()


@dataclass(frozen=True, repr=False)
class Comparison(Answer):
    """Runs compared with the first, the baseline."""

    names: Sequence[str]
    compared: Sequence[Compared]
    tolerance_pct: float
    alone: Sequence[str] = ()  # systems that are missing in some source
    fits: Sequence[Fit] = field(default=(), compare=False)  # of the sources, if each has one system
    upgrades: Sequence[Upgrade] = ()  # plans of a load with each source's steps

    @property
    def baseline(self) -> str:
        return self.names[0]

    @property
    def verdicts(self) -> list[str]:
        return [each.verdict for each in self.compared]

    @property
    def slower(self) -> list[str]:
        """Names of runs that are slower than the tolerance allows."""
        return [each.name for each in self.compared if each.verdict == "slower"]

    @property
    def states(self) -> list[State]:
        return [STATES.get(verdict, "good") for verdict in self.verdicts]

    @property
    def sentences(self) -> list[str]:
        return list(map(reporting.steps.comparison_sentence, self.compared))

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        state = min(self.states, key=("bad", "doubt", "good").index)
        load_lines = [line for each in self.upgrades for line in each.sentences(self.baseline)]
        changes_table = reporting.steps.changes_table
        upgrades = [reporting.plan_tables.upgrade_table(each) for each in self.upgrades if each.changes]
        tables = [changes_table(each.name, each) for each in self.compared]
        if self.fits:
            tables.append(reporting.steps.comparison_table(self.names, [each.result for each in self.fits]))
        if len(self.compared) <= MAX_IN_FULL:
            basis = [reporting.steps.comparison_basis(each, self.tolerance_pct) for each in self.compared]
            brief = [*(changes_table(each.name, each, brief=True) for each in self.compared), *upgrades]
            text, lines = " ".join(self.sentences), [*basis, *load_lines]
        else:
            worst_first = sorted(self.compared, key=lambda each: each.verdict != "slower")
            lines = list(map(reporting.steps.comparison_sentence, worst_first[:MAX_VERDICTS]))
            if (more := len(worst_first) - MAX_VERDICTS) > 0:
                lines.append(f"... and {more:,} more: --json has them.")
            lines, brief = [*lines, *load_lines], []
            text = f"{len(self.slower)} of {len(self.compared)} runs are slower than {self.baseline}."
        return reporting.table.Shown(text, state, lines, (), self.messages, brief, [*tables, *upgrades])

    @property
    def messages(self) -> list[Message]:
        differ: dict[str, list[str]] = {}
        for each in self.compared:
            if each.differs:
                differ.setdefault("; ".join(each.differs), []).append(each.name)
        found = [f"The systems differ ({', '.join(names)}): {facts}." for facts, names in differ.items()]
        if any(each.one_start_each and each.verdict == "unclear" for each in self.compared):
            found.append("Measure both in turn, twice or more, and compare all: latfit compare A B A2 B2 --alternate.")
        if self.alone:
            found.append(f"Not in every source, not compared: {', '.join(self.alone)}.")
        return list(map(note, found))

    def check(self) -> None:
        """Raise Regression if a run is slower, or needs more replicas for the load."""
        needing = [each.source for each in self.upgrades if each.worse]
        if self.slower:
            named = ", ".join(self.slower[:MAX_SLOWER]) + (" and more" if len(self.slower) > MAX_SLOWER else "")
            found = f"{named}: slower than {self.baseline} by more than {format_percent(self.tolerance_pct)}"
            raise Regression(found, remedy="Look at what changed, or accept it with a larger --tolerance.")
        if needing:
            found = f"{', '.join(needing)}: the load needs more replicas"
            raise Regression(found, remedy="Look at what changed, or plan with more: latfit plan.")

    @property
    def table(self) -> Any:
        rows = []
        for name, phase in ((each.name, phase) for each in self.compared for phase in each.phases):
            for region in phase.tested:
                facts = {field: getattr(region, field) for field in RegionChange.__struct_fields__}
                facts["verdict"] = phase.verdict_on_whole if region is phase else region.verdict
                ends = {f"{size}_{end}": facts[size][i] for size in "BS" for i, end in enumerate(("low", "high"))}
                about = {"source": name, "phase": phase.phase, "of": "phase" if region is phase else "region"}
                rows.append(about | {"by": phase.by} | ends | {k: v for k, v in facts.items() if k not in "BS"})
        return data_frame(rows).set_index("source")

    @property
    def result(self) -> ComparisonRecord:
        names = self.names[1:]
        return ComparisonRecord(self.baseline, names, self.tolerance_pct, self.compared, self.alone, self.upgrades)


@verb(CompareRequest)
def compare_runs(request: CompareRequest) -> Comparison:
    """Compare runs with the first one, phase by phase and by regions of (B, S).

    Common cells are compared where steps can be read, else fits. With a load, `upgrades` says what changes mean for it.
    Raises WrongUsage, FitNotUsable, BadInput.
    """
    sources, by_path = request.sources, bool(request.path and "{" in request.path)
    tolerance_pct = percent(request.tolerance, "--tolerance")
    if not tolerance_pct >= 0:
        raise WrongUsage(f"a tolerance of {tolerance_pct:g} %", where="--tolerance", remedy="Give 0 or more.")
    if len(sources) < 2:
        raise WrongUsage("one fit has nothing to be compared with", remedy="Name two or more.")
    names = list(request.names or (_name(source, i) for i, source in enumerate(sources, start=1)))
    if len(names) != len(sources):
        found = f"{len(names)} names for {len(sources)} fits"
        raise WrongUsage(found, where="--set names", remedy="Give a name for each.")
    if by_path and not request.each:
        raise WrongUsage(f"{request.path!r} names several paths", where="--path", remedy="Add --each.")
    if request.each:
        systems = _fit_alike(sources, partial(_fit_each, request))
        pairs, alone = _match(names, systems, by_path=by_path)
        return Comparison(names, _compare(names[0], pairs, tolerance_pct), tolerance_pct, alone)
    if request.alternate and (len(sources) < 2 * MIN_STARTS or len(sources) % 2):
        found = f"{len(sources)} runs are not {MIN_STARTS} or more a side"
        raise WrongUsage(found, where="--alternate", remedy="Name them in turn: A B A2 B2.")
    fits = [found for (found,) in _fit_alike(sources, partial(_fit_one, request))]
    if request.alternate:
        return _compare_starts(names, fits, tolerance_pct)
    pairs = [(name, "", fits[0], other) for name, other in zip(names[1:], fits[1:], strict=True)]
    upgrades = [] if request.rate is None else _compare_plans(request, names, fits)
    return Comparison(names, _compare(names[0], pairs, tolerance_pct), tolerance_pct, [], fits, upgrades)


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


def _compare_plans(request: CompareRequest, names: Sequence[str], fits: Sequence[Fit]) -> list[Upgrade]:
    plans = [_plan(request, fit) for fit in fits]
    (first, *others), (first_fit, *other_fits) = plans, fits
    found = []
    for name, plan, other in zip(names[1:], others, other_fits, strict=True):
        as_before: Sequence[Reached] = ()
        if first.feasible and first.replicas is not None:
            settings = {key: value for key, value in first.engine.items() if value is not None}
            as_before = _plan(request, other, replicas=first.replicas, engine=settings).result.targets
        found.append(
            Upgrade(
                source=name,
                load=first.result.load,
                baseline_replicas=first.replicas,
                replicas=plan.replicas,
                as_before=as_before,
                baseline_price_per_hour=first.result.cost.price_per_hour,
                price_per_hour=plan.result.cost.price_per_hour,
                changes=compare_steps(first.result, first_fit.result, other.result),
            )
        )
    return found


def _plan(request: CompareRequest, found: Fit, **more: Any) -> EnginePlan:
    return plan_engine.of(shared(EnginePlanRequest, request, fit=found, force=True, **more))


def _compare_starts(names: Sequence[str], fits: Sequence[Fit], tolerance_pct: float) -> Comparison:
    """Compare two sides whose runs alternate. Raises WrongUsage."""
    for (one, first), (two, other) in combinations(zip(names, fits, strict=True), 2):
        if one == two or _starts(first) & _starts(other):
            remedy = "Start the engine anew for each run; parts of one start show no variance between starts."
            raise WrongUsage(f"{one} and {two} are of one start", where="--alternate", remedy=remedy)
    runs = [Measured.of(found.result, found.rows()) for found in fits]
    sides = [f"{side[0]} and {len(side) - 1} more" for side in (names[::2], names[1::2])]
    change, differs = change_over_starts(runs[::2], runs[1::2], tolerance_pct), _differences(fits[0], fits[1])
    compared = Compared.of(change, source=sides[1], baseline=sides[0], differs=differs)
    return Comparison(sides, [compared], tolerance_pct, [], fits)


def _starts(found: Fit) -> set[str]:
    rows, facts = found.rows(), facts_of(found.result.provenance.get("trace") or {})
    if facts.more.get("made_by") == "latfit profile":
        return set()  # its processes are repeats of one measurement
    named: list[Any] = [] if rows is None or "run" not in rows else list(rows.coded("run")[1])
    for each in facts.sources:
        named += [each.run, *(each.runs if not isinstance(each.runs, int) else ())]
    return {str(each) for each in named if RECORDED_RUN.fullmatch(str(each))}


Pair = tuple[str, str, Fit, Fit]
"""Name of a source, label of a system, the baseline's fit and the source's."""


def _compare(baseline: str, pairs: Sequence[Pair], tolerance_pct: float) -> list[Compared]:
    measured = {id(found): Measured.of(found.result, found.rows()) for pair in pairs for found in pair[2:]}
    runs = [(measured[id(first)], measured[id(other)]) for _, _, first, other in pairs]
    compared = []
    for (name, system, first, other), change in zip(pairs, changes_between(runs, tolerance_pct), strict=True):
        starts, others = _starts(first), _starts(other)
        one_start_each = bool(starts and others and not starts & others)
        facts = {"source": name, "baseline": baseline, "system": system, "differs": _differences(first, other)}
        compared.append(Compared.of(change, one_start_each=one_start_each, **facts))
    return compared


def _fit_alike(sources: Sequence[Any], fitted: Callable[[Any, Clock | None], list[Fit]]) -> list[list[Fit]]:
    """Return the fits of each source, all of the same time."""
    times = {found.time for source in sources if _is_fit(source) for found in fitted(source, None)}
    if len(times) > 1:
        differ = "one fit is of the period of a step, another of the engine's own time"
        raise BadInput(differ, remedy="Fit both with the same --time.")
    time: Clock | None = next(iter(times), None)
    found = [fitted(source, time) for source in sources]
    if len({each.time for fits in found for each in fits}) > 1:
        found = [fitted(source, "compute") for source in sources]
    return found


def _fit_one(request: CompareRequest, source: Any, time: Clock | None) -> list[Fit]:
    if _is_fit(source):
        return [as_fit(source)]
    path, reading = request.path, shared(ReadRequest, request, source=source)
    steps = read.of(reading)
    if path and "path" in steps.trace:
        where = " and ".join(filter(None, [reading.where and f"({reading.where})", f"path == {path!r}"]))
        steps = read.of(replace(reading, where=where))
    check_one_system(steps, "Compare one of them with --where, or each with the same one of the others with --each.")
    if len(steps.trace) < MIN_STEPS and row_weights(steps.trace) is None:
        found = "one step" if len(steps.trace) == 1 else f"{len(steps.trace)} steps"
        remedy = "Compare runs that hold several steps in each of several cells (B, S)."
        raise BadInput(f"{found} cannot be compared: a fit needs more", where=steps.name, remedy=remedy)
    return [fit(steps, seed=request.seed, path=path, time=time)]


def _fit_each(request: CompareRequest, source: Any, time: Clock | None) -> list[Fit]:
    if _is_fit(source):
        return [as_fit(source)]
    found = list(fit_each.of(shared(FitEachRequest, request, source=source, time=time)).values())
    usable = [each for each in found if each.ok]
    if not usable:
        check_usable(found[0])
    return usable


def _match(names: Sequence[str], systems: Sequence[Sequence[Fit]], *, by_path: bool) -> tuple[list[Pair], list[str]]:
    """Pair systems with the baseline's; return also the labels of the others."""
    by_key = [{_key(found, by_path=by_path): found for found in each} for each in systems]
    pairs = [
        (name, _label(key), by_key[0][key], found)
        for name, fits in zip(names[1:], by_key[1:], strict=True)
        for key, found in fits.items()
        if key in by_key[0]
    ]
    if not pairs:
        listed = " vs ".join("; ".join(_label(key) or "unnamed" for key in list(fits)[:MAX_LABELS]) for fits in by_key)
        remedy = "Compare one of each with --where, or match them by columns: --path '{model}-tp{tp}'."
        raise BadInput(f"no system is in two sources: {listed}", remedy=remedy)
    everywhere = set.intersection(*map(set, by_key))
    return pairs, sorted({_label(key) for fits in by_key for key in fits if key not in everywhere})


Key = tuple[tuple[str, str], ...]
"""Columns of a system with their values."""


def _key(found: Fit, *, by_path: bool) -> Key:
    if by_path:
        return (("path", found.path or ""),)
    facts = {**fitted_identity(found.result), **found.system}
    return tuple((name, facts[name]) for name in ("hardware", "model", "tp", "path") if facts.get(name))


def _label(key: Key) -> str:
    return ", ".join(value for _, value in key)


def _differences(first: Fit, other: Fit) -> list[str]:
    """Return facts such as `hardware: a100 vs h100`."""
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
