"""Simulated runs as one page: who answers fastest, the picture, the tables, and what was simulated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latfit.report import layout, style
from latfit.report.fit.tables import KeyNumber, Table
from latfit.report.format import count, number, percent
from latfit.report.layout import Picture, Rendered, Written
from latfit.report.simulation import tables as served, tables as simulated
from latfit.report.simulation.tables import Run, frontier, known, settings_text
from latfit.simulation import EngineRun, ServicePath, System
from latfit.units import format_ms

PAGE_NAME = "simulation.html"


@dataclass(frozen=True)
class Making:
    """How the runs came about. sla_ms: the limit that attainment was counted against; infinite for none."""

    command: str = ""
    made_at: str = ""
    sla_ms: float = math.inf

    @property
    def sla(self) -> str:
        """In words; none where there is no limit."""
        return format_ms(self.sla_ms) if math.isfinite(self.sla_ms) else ""


@dataclass(frozen=True)
class _Answer:
    """What the card says. carried: whether anything carries the load, within the SLA where there is one."""

    asked: str
    verdict: str
    sentence: str
    carried: bool
    beside: Sequence[str] = ()
    numbers: Sequence[KeyNumber] = field(default_factory=list)


def write_page(folder: Path, rendered: Rendered) -> Written:
    """Store the page and its picture in `folder`. Raises TargetNotWritable."""
    return layout.write_rendered(folder, PAGE_NAME, rendered)


def policies_page(
    runs: Sequence[Run], system: System, made: Making, findings: Sequence[tuple[str, str]] = ()
) -> Rendered:
    """Batching policies. runs: entries of `simulate --json`; findings: claims of a study and what came out."""
    several = len({run["rate_per_s"] for run in runs}) > 1
    title = "p99 over the rate" if several else "Median, 90th and 99th percentile of response times"
    answer = _policies_answer(runs, made)
    alt = f"{title} of {counted_names(runs)}. {answer.sentence}"
    picture = Picture("simulation", title, alt, style.png(simulated.runs_figure(runs)))
    tables = [simulated.rates_table(runs)] if several else []
    return _rendered(
        {
            "title": "Simulated batching policies",
            "answer": answer,
            "heading": "Response times",
            "broad": False,
            "tables": [*tables, simulated.runs_table(runs)],
            "findings": list(findings),
            "warnings": _warnings(runs),
            "machine": paths_table(system),
        },
        picture,
        made,
    )


def engines_page(found: Sequence[tuple[Run, EngineRun]], made: Making) -> Rendered:
    """Serving engines. found: entries of `simulate --json`, each with its first replication."""
    runs = [entry for entry, _ in found]
    answer = _engines_answer(runs, made)
    title = "Time to first token, waiting requests and KV blocks"
    alt = f"{title} of the first replication of each run. {answer.sentence}"
    picture = Picture("simulation", title, alt, style.png(served.engine_figure(found)))
    return _rendered(
        {
            "title": "Simulated serving engines",
            "answer": answer,
            "heading": "What requests saw",
            "broad": True,
            "tables": served.engine_tables(runs),
            "findings": [],
            "warnings": _warnings(runs),
            "machine": settings_table(runs),
        },
        picture,
        made,
    )


def paths_table(system: System) -> Table:
    """The paths as they were simulated."""
    rows = [(path.name, part, *_path_row(path)) for path, part in zip(system.paths, ("main", "side"), strict=False)]
    columns = ("path", "part", "one request", "largest batch", "its time", "servers", "times", "source")
    return Table("Execution paths", columns, rows, words=("part", "times", "source"))


def settings_table(runs: Sequence[Run]) -> Table:
    """The limits of the engines, a column a distinct set of them."""
    kinds: dict[str, Mapping[str, Any]] = {str(run["engine"]): run["settings"] for run in runs}
    names = list(dict.fromkeys(name for settings in kinds.values() for name in settings))
    rows = [(name, *(_plain(settings.get(name)) for settings in kinds.values())) for name in names]
    rows += [("requests", *(count(next(r["requests"] for r in runs if r["engine"] == kind)) for kind in kinds))]
    return Table("Engines and their limits", ("limit", *kinds), rows)


def counted_names(runs: Sequence[Run]) -> str:
    """The policies or engines, each once."""
    return ", ".join(dict.fromkeys(str(run["policy"]) for run in runs))


def _rendered(parts: Mapping[str, Any], picture: Picture, made: Making) -> Rendered:
    html = layout.template("simulated.html").render(
        **parts, pictures=[layout.shown(picture)], making=layout.making(made.command, made.made_at), notes=()
    )
    return Rendered(html, [picture])


def _policies_answer(runs: Sequence[Run], made: Making) -> _Answer:
    asked = _asked(runs, made)
    stable = frontier(runs)
    if not stable:
        return _Answer(asked, "not carried", "No policy carries this load; requests wait longer and longer.", False)
    meeting = [run for run in stable if run["latency_ms"]["p99"] <= made.sla_ms]
    highest = max(known(run["rate_per_s"], 0.0) for run in meeting or stable)
    there = [run for run in stable if known(run["rate_per_s"], 0.0) == highest]
    best = min(there, key=lambda run: float(run["latency_ms"]["p99"]))
    latency = best["latency_ms"]
    sentence = f"{_name(best)}: 99 % of responses within {format_ms(latency['p99'])}"
    if len(there) > 1:
        worst = max(there, key=lambda run: float(run["latency_ms"]["p99"]))
        sentence += f", {_name(worst)} {format_ms(worst['latency_ms']['p99'])}"
    several = len({run["rate_per_s"] for run in runs}) > 1
    within = f" with 99 % within {made.sla}" if made.sla and meeting else ""
    where = f"At {number(highest)}/s, the highest rate here that anything carries{within}, the fastest is "
    verdict = "carried" if meeting else "too slow for the SLA"
    numbers = [
        KeyNumber("p99", format_ms(latency["p99"]), _interval(latency)),
        KeyNumber("Median", format_ms(latency["p50"]), f"mean {format_ms(latency['mean'])}"),
        KeyNumber("Batch", number(best["batch_size"]["p50"], 3), "requests, the median of all batches"),
        *(KeyNumber(f"On {name}", percent(100 * share), "of the requests") for name, share in _side_share(best)),
    ]
    if best.get("slo_attainment") is not None:
        numbers.append(KeyNumber("In time", percent(100 * best["slo_attainment"]), made.sla and f"within {made.sla}"))
    beside = simulated.differences(runs) if not several else []
    return _Answer(asked, verdict, f"{where if several else ''}{sentence}.", bool(meeting), beside, numbers)


def _engines_answer(runs: Sequence[Run], made: Making) -> _Answer:
    asked = _asked(runs, made)
    stable = [run for run in runs if run["stable"]]
    if not stable:
        return _Answer(asked, "not carried", "No engine carries this load; requests wait longer and longer.", False)
    highest = max(run["rate_per_s"] for run in stable)
    there = [run for run in stable if run["rate_per_s"] == highest]
    best = min(there, key=lambda run: known(run["latency_ms"]["p99"], math.inf))
    first, each, whole = (best[name] for name in ("ttft_ms", "tpot_ms", "latency_ms"))
    several = len({run["rate_per_s"] for run in runs}) > 1
    where = f"at {number(highest)}/s " if several else ""
    sentence = (
        f"{best['engine']}, {best['order']}: {where}99 % of first tokens within {format_ms(known(first['p99']))}, whole"
        f" answers within {format_ms(known(whole['p99']))}."
    )
    numbers = [
        KeyNumber("First token", format_ms(known(first["mean"])), f"mean; p99 {format_ms(known(first['p99']))}"),
        KeyNumber("Between tokens", format_ms(known(each["mean"])), f"mean; p99 {format_ms(known(each['p99']))}"),
        KeyNumber("Whole answer", format_ms(known(whole["mean"])), f"mean; p99 {format_ms(known(whole['p99']))}"),
        KeyNumber("Served", f"{best['throughput_per_s']:,.3g}/s", f"engine busy {best['utilisation']['engine']:.0%}"),
    ]
    return _Answer(asked, "carried", sentence, True, (), numbers)


def _asked(runs: Sequence[Run], made: Making) -> str:
    rates = sorted({known(run["rate_per_s"]) for run in runs})
    if any(math.isnan(rate) for rate in rates):
        load = "A closed loop of users"
    else:
        load = f"{number(rates[0])}/s" if len(rates) == 1 else f"{number(rates[0])} to {number(rates[-1])}/s"
    return f"{load}, {counted_names(runs)}" + (f", SLA {made.sla}" if made.sla else "")


def _warnings(runs: Sequence[Run]) -> list[dict[str, str]]:
    quoted = list(dict.fromkeys(name for run in runs for name in run.get("quoted", ())))
    found = [
        {
            "path": name,
            "message": "its times are quoted, not measured.",
            "remedy": "Measure with `latfit profile` on that machine, then `latfit fit`.",
        }
        for name in quoted
    ]
    notes = dict.fromkeys(text for run in runs for text in run["notes"])
    return found + [{"path": "", "message": text, "remedy": ""} for text in notes]


def _name(run: Run) -> str:
    settings = settings_text(run)
    return f"{run['policy']} ({settings})" if settings else str(run["policy"])


def _side_share(run: Run) -> list[tuple[str, float]]:
    return list(run["share"].items())[1:]


def _interval(latency: Mapping[str, Any]) -> str:
    low, high = latency["ci"]["p99"]
    if low is None or high is None or math.isnan(high - low):
        return "too few requests for an interval"
    return f"{format_ms(low, 4)} to {format_ms(high, 4)} (95 %)"


def _path_row(path: ServicePath) -> tuple[str, ...]:
    times = path.typical_ms
    scatter = (
        "exponential" if path.exponential else "always the same" if path.scatter is None else "as its measured steps"
    )
    source = "quoted" if path.quoted else "measured"
    largest = count(path.largest)
    return format_ms(float(times[1])), largest, format_ms(float(times[-1])), count(path.servers), scatter, source


def _plain(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return count(value) if isinstance(value, int | float) else str(value)
