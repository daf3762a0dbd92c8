"""What an export needs of a plan, read from its document (`latfit plan --json`, `--out`) and checked.

A plan's file may have been changed by hand or made by another version, so every number is checked before it is written
into a file that another program runs.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from latfit.errors import BadInput, FitNotUsable, SlaOutOfReach
from latfit.files import dumps
from latfit.inputs import decode_json, read_json
from latfit.units import format_ms, format_percent, format_rate

Kind = Literal["requests", "batches", "steps"]
MADE_BY = "latfit plan --out plan.json"
DIGITS = 12
HELD_DIGITS = 3
"""Of the highest rate, as `latfit plan` prints it: the search knows two."""

MOST = 2**31 - 1
"""The largest number that engines take."""

SCHEDULED = "the replicas of the whole load; the plan's schedule, with fewer where less comes, is not exported."
ENGINES = ("vllm", "sglang", "trtllm", "triton", "triton_batched", "tensorrt", "llamacpp")
OF_BATCHES: Mapping[str, tuple[str, ...]] = {
    "triton": ("max_batch_size", "max_queue_delay_microseconds"),
    "triton_batched": ("max_batch_size", "max_queue_delay_microseconds", "preferred_batch_size"),
    "tensorrt": ("min_batch", "opt_batch", "max_batch"),
}
"""Settings that an engine of whole batches cannot do without."""

LISTS = ("preferred_batch_size",)
LEAST = {"max_queue_delay_microseconds": 0, "default_timeout_microseconds": 0, "chunked_prefill_size": -1}
"""Of settings that may be less than 1: no delay; SGLang's word for no chunks."""


@dataclass(frozen=True)
class Way:
    """How a load of batches is served, or could be. chosen: the plan's decision; margin: of the SLA."""

    kind: str
    paths: tuple[str, ...]
    T_cut_ms: float | None
    name: str
    percentile_ms: float | None
    chosen: bool


@dataclass(frozen=True)
class Replicas:
    """Engines for requests: how many, behind which router, and what a simulated one had. kv_tokens: None where the
    cache was taken as unlimited."""

    count: int
    route: str
    kv_tokens: int | None
    order: str
    prefix_hit_rate: float


@dataclass(frozen=True)
class Timetable:
    """Replicas over a recorded day. asked: from when on (s after its begin), how many, rising; span_s: of the windows;
    window_s: of one, by which the recording may be longer at most.  start_up_s: what an engine takes to be there, by
    which it is asked for ahead.  hours, fixed_hours: of replicas, with it and with the number that is always there."""

    asked: Sequence[tuple[float, int]]
    span_s: float
    window_s: float
    start_up_s: float
    hours: float
    fixed_hours: float


@dataclass(frozen=True)
class Pair:
    """Replicas that prefill and replicas that decode, as they stand in a plan beside those that do both. transfer: of
    keys and values, in words.  answer, holds, flags: as of the plan."""

    prefill: int
    decode: int
    transfer: str
    answer: str
    holds: str
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class PlanFacts:
    """A plan as an export sees it. kind: of requests with prompts and outputs, of batches at a rate, of single steps.

    name: its file and digest.  answer: the plan in a sentence.  holds: the condition under which its numbers hold.
    rests: the fits that it was made from, with their errors.  open: what is in doubt or warned of; assumed: what was
    taken as given.  flags: by engine.  path: that they are of.  names: of paths, by their labels.  system: facts of the
    machine and the model, as the traces say them.  batches_of_note: B1, B2 and the knee.
    """

    kind: Kind
    name: str
    answer: str
    holds: str
    rests: Sequence[str]
    open: Sequence[str]
    assumed: Sequence[str]
    flags: Mapping[str, Mapping[str, Any]]
    system: Mapping[str, str] = field(default_factory=dict)
    replicas: Replicas | None = None
    ways: Sequence[Way] = ()
    tokens_per_request: int = 1
    tensor_parallel: int | None = None
    path: str = "gpu"
    names: Mapping[str, str] = field(default_factory=dict)
    batches_of_note: Sequence[int] = ()
    timetable: Timetable | None = None
    pair: Pair | None = None

    @property
    def chosen(self) -> Way | None:
        return next((way for way in self.ways if way.chosen), None)

    @property
    def file(self) -> str:
        """The name without its digest."""
        return self.name.rpartition(" (")[0]

    @property
    def errors(self) -> str:
        """The fits with their errors, in a few words."""
        return "; ".join(self.rests) or "nominal numbers, nothing measured"


def read_plan(plan: str | Path | Mapping[str, Any]) -> PlanFacts:
    """The facts of a plan's file or document. Raises BadInput where it is none, SlaOutOfReach where it cannot be met,
    FitNotUsable where its data do not support it."""
    if isinstance(plan, str | Path):
        document = read_json(Path(plan), what="plan", made_by=MADE_BY)
        file = Path(plan).name
    else:
        file = "the plan"
        try:
            document = decode_json(dumps(dict(plan)).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"not a plan ({error})", where=file, remedy=f"Make one with `{MADE_BY}`.") from None
    if not isinstance(document, dict) or not {"feasible", "engines", "promise"} <= set(document):
        raise BadInput("not a plan", where=file, remedy=f"Make one with `{MADE_BY}`.")
    reader = _Reader(document, file)
    try:
        digest = hashlib.sha256(f"{dumps(document)}\n".encode()).hexdigest()[:DIGITS]  # as `--out` writes it
        reader.refuse_what_does_not_hold()
        return reader.facts(f"{file} (sha256 {digest})")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {str(error)[:80]}"
        raise BadInput(f"not a whole plan ({what})", where=file, remedy=f"Make it again with `{MADE_BY}`.") from None


@dataclass(frozen=True)
class _Reader:
    document: Mapping[str, Any]
    file: str

    def refuse_what_does_not_hold(self) -> None:
        """Raises SlaOutOfReach, FitNotUsable."""
        unsupported = _texts(self.document.get("unsupported"))
        if not self.document["feasible"]:
            raise SlaOutOfReach(
                f"the plan cannot be met: {_text(self.document.get('binding'))}",
                where=self.file,
                remedy="There are no settings to export. Plan with wider limits, a lower rate or more replicas.",
            )
        if unsupported:
            raise FitNotUsable(
                f"the plan is not supported by its data: {unsupported[0]}",
                where=self.file,
                remedy="Measure such steps, or fit a better model (latfit fit), and plan again.",
            )

    def facts(self, name: str) -> PlanFacts:
        found = self.document
        fits = self._fits()
        common: dict[str, Any] = {
            "name": name,
            "rests": [_quality(each) for each in fits],
            "open": self._open(),
            "assumed": [*_texts(found["notes"]), *([SCHEDULED] if found.get("schedule") else [])],
            "flags": {name: _checked(name, found["engines"][name]) for name in ENGINES if name in found["engines"]},
            "system": _agreed([each["system"] for each in fits]),
        }
        if found.get("kind") == "serving":
            return PlanFacts(kind="requests", **common, **self._of_requests())
        return PlanFacts(**common, **self._of_batches())

    def _fits(self) -> Sequence[Mapping[str, Any]]:
        """The fits that the settings rest on; a plan of steps or batches may know of more paths."""
        found = self.document["fits"]
        if self.document.get("kind") == "serving":
            return [*found]
        names = _names(found)
        used = {_text(self.document["engines_path"])}
        used |= {
            names.get(label, label) for row in self.document["strategies"] if row["chosen"] for label in row["paths"]
        }
        return [each for each in found if each["path"] in used]

    def _open(self) -> list[str]:
        warnings = [f"{_text(each['message'])} {_text(each['remedy'])}" for each in self.document["warnings"]]
        return [*_texts(self.document.get("why_in_doubt")), *warnings]

    def _of_requests(self) -> dict[str, Any]:
        found = self.document
        count, engine = _count(found["replicas"]["value"], "replicas"), found["engine"]
        told = ", ".join(_target(each) for each in found["targets"])
        highest, rate = found["highest_rate_per_s"], float(found["rate_per_s"])
        asked = format_rate(rate) if found["users"] is None else f"{found['users']} users"
        up_to = "" if highest is None else f", and up to {format_rate(float(highest), down=True, digits=HELD_DIGITS)}"
        slower = found["steps_may_be_slower_pct"]
        spare = "" if slower is None else f"; steps may be {format_percent(float(slower))} slower"
        doubt = "In doubt: " if found["promise"] != "yes" else ""
        known = found["kv_cache"] is not None
        blocks = _count(engine["kv_blocks"], "kv_blocks") * _count(engine["block_size"], "block_size")
        parallel = found.get("tensor_parallel")
        system = [each["system"].get("path") or each["path"] for each in found["fits"]]
        return {
            "answer": f"{doubt}{_replicas(count)} for {asked} ({_text(found['request'])}): {told}.",
            "holds": f"{_limits(found['targets'])} at {asked} over {_replicas(count)}{up_to}"
            f" ({_text(found['request'])}){spare}",
            "replicas": Replicas(
                count=count,
                route=_text(found["route"]),
                kv_tokens=blocks if known else None,
                order=_text(engine["order"]),
                prefix_hit_rate=float(engine["prefix_hit_rate"]),
            ),
            "tensor_parallel": None if parallel is None else _count(parallel, "tensor_parallel"),
            "path": next((each for each in system if each), "gpu"),
            "timetable": self._timetable(),
            "pair": self._pair(asked),
        }

    def _timetable(self) -> Timetable | None:
        found = self.document.get("schedule")
        if not found or found["feasible"] is not True:
            return None
        asked = [(_seconds(at), _count(count, "replicas_at")) for at, count in found["replicas_at"]]
        if not asked or asked[0][0] != 0.0 or any(a[0] >= b[0] for a, b in itertools.pairwise(asked)):
            raise ValueError("replicas_at does not rise from 0 on")
        window_s = _seconds(found["window_s"])
        return Timetable(
            asked=asked,
            span_s=_seconds(found["windows"][-1]["t_s"]) + window_s,
            window_s=window_s,
            start_up_s=_seconds(found["start_up_s"]),
            hours=_seconds(found["replica_hours"]),
            fixed_hours=_seconds(found["fixed"]["replica_hours"]),
        )

    def _pair(self, asked: str) -> Pair | None:
        """asked: the load, in words."""
        found = self.document.get("prefill_apart")
        if not found or found["feasible"] is not True or "engines" not in found:
            return None
        prefill, decode = (_count(found[name], name) for name in ("prefill_replicas", "replicas"))
        fixed_ms, token_ms = (format_ms(_seconds(each)) for each in found["transfer_ms"])
        both = f"{_replicas(prefill)} that prefill and {decode:,} that decode"
        highest, request = found["highest_rate_per_s"], _text(self.document["request"])
        up_to = "" if highest is None else f", and up to {format_rate(float(highest), down=True, digits=HELD_DIGITS)}"
        told = ", ".join(_target(each) for each in found["targets"])
        return Pair(
            prefill,
            decode,
            f"{fixed_ms} and {token_ms} a token",
            f"{both} for {asked} ({request}): {told}.",
            f"{_limits(found['targets'])} at {asked} over {both}{up_to} ({request})",
            {"vllm": _checked("vllm", found["engines"]["vllm"])},
        )

    def _of_batches(self) -> dict[str, Any]:
        found = self.document
        sla, percentile = format_ms(float(found["sla_ms"])), found["percentile"]
        rate = found["rate_per_s"]
        share = "a typical" if percentile is None else f"the p{float(percentile):g}"
        of_steps = f"{share} step within {sla}"
        if rate is not None:
            capacity = found["capacity"].get("sustainable_per_s")
            up_to = "" if capacity is None else f", and up to {format_rate(float(capacity), down=True)}"
            tokens = _count(found["tokens_per_request"], "tokens_per_request")
            held = f"{share} response within {sla} at {format_rate(float(rate))} a replica{up_to}, requests of {tokens}"
            held += " token" if tokens == 1 else " tokens"
        thresholds = [found[name].get("value") for name in ("B1", "B1_at_rate", "B2", "knee")]
        return {
            "kind": "steps" if rate is None else "batches",
            "answer": _text(found["answer"]),
            "holds": of_steps if rate is None else held,
            "ways": [_way(each) for each in found["strategies"]],
            "tokens_per_request": _count(found["tokens_per_request"], "tokens_per_request"),
            "path": _text(found["engines_path"]),
            "names": _names(found["fits"]),
            "batches_of_note": [_count(each, "a threshold") for each in thresholds if each is not None],
        }


def _names(fits: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names of paths by their labels, which mark what was not measured."""
    names = [_text(each["path"]) for each in fits]
    return {label: name for name in names for label in (name, f"{name} (nominal)")}


def _way(found: Mapping[str, Any]) -> Way:
    cut, percentile = found["T_cut_ms"], found["percentile_ms"]
    if cut is not None and not 0 <= float(cut) < math.inf:
        raise ValueError(f"T_cut_ms {cut!r}")
    paths = tuple(_text(each) for each in found["paths"])
    if len(paths) != (1 if cut is None else 2):
        raise ValueError(f"a strategy on {len(paths)} paths")
    return Way(
        kind=_text(found["kind"]),
        paths=paths,
        T_cut_ms=None if cut is None else float(cut),
        name=_text(found["name"]),
        percentile_ms=None if percentile is None else float(percentile),
        chosen=found["chosen"] is True,
    )


def _quality(found: Mapping[str, Any]) -> str:
    """`trace.parquet, roofline, 12 % off on unseen steps`."""
    error = found["error_pct"]
    if error is None:
        return f"{_text(found['fit'])}, {_text(found['model'])}, error not known"
    phases = ", ".join(f"{_text(name)} {format_percent(float(e))}" for name, e in found["error_pct_by_phase"].items())
    beside = f" ({phases})" if phases else ""
    return f"{_text(found['fit'])}, {_text(found['model'])}, {format_percent(float(error))} off on unseen steps{beside}"


def _target(found: Mapping[str, Any]) -> str:
    """`p99 TTFT 1.01 s of 2 s`."""
    if "limit_pct" in found:
        share, limit = float(found["value_pct"]), float(found["limit_pct"])
        return f"{100 - share:.4g} % of requests meet all limits, {100 - limit:.4g} % asked"
    return f"{_text(found['target'])} {format_ms(float(found['value_ms']))} of {format_ms(float(found['limit_ms']))}"


def _limits(targets: Sequence[Mapping[str, Any]]) -> str:
    """`p99 TTFT within 2 s, p99 TPOT within 200 ms`."""
    return ", ".join(
        f"{100 - float(each['limit_pct']):.4g} % of requests within all limits"
        if "limit_pct" in each
        else f"{_text(each['target'])} within {format_ms(float(each['limit_ms']))}"
        for each in targets
    )


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count:,} replicas"


def _checked(engine: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an engine: counts and lists of counts; for those of steps switches and plain words too."""
    needed = OF_BATCHES.get(engine, ())
    if missing := [name for name in needed if name not in flags]:
        raise KeyError(f"{engine} has no {missing[0]}")
    return {_word(name): _value(value, name, plain=bool(needed)) for name, value in flags.items()}


def _value(value: Any, name: str, *, plain: bool) -> Any:
    """plain: numbers alone."""
    if name in LISTS:
        if not isinstance(value, list) or not value:
            raise TypeError(f"{name} is {str(value)[:40]!r}")
        return [_count(each, name) for each in value]
    if isinstance(value, bool | str) and not plain:
        return value if isinstance(value, bool) else _word(value)
    return _count(value, name, LEAST.get(name, 1))


def _word(text: Any) -> str:
    if not isinstance(text, str) or not text.replace("_", "").replace("-", "").isalnum() or not text.isascii():
        raise ValueError(f"{str(text)[:40]!r} is no name of a setting")
    return text


def _count(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    return value


def _seconds(value: Any) -> float:
    """A time, or a number of hours: finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _texts(value: Any) -> list[str]:
    return [_text(each) for each in value or ()]


def _agreed(systems: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What all fits that say it say alike."""
    said: dict[str, set[str]] = {}
    for each in systems:
        for name, value in each.items():
            said.setdefault(_text(name), set()).add(_text(value))
    return {name: next(iter(values)) for name, values in said.items() if len(values) == 1}
