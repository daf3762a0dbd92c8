"""Simulated runs as one page: who answers fastest, the picture, the tables, and what was simulated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latfit.reporting import layout, style
from latfit.reporting.fit.tables import KeyNumber, Table
from latfit.reporting.format import count
from latfit.reporting.layout import Picture, Rendered, Written
from latfit.reporting.simulation import figures, tables
from latfit.reporting.simulation.brief import distinct, engines_verdict, policies_verdict
from latfit.simulation import EngineResult, Interval, ServicePath, SimResult, System
from latfit.units import format_ms, format_percent, format_rate, number

PAGE_NAME = "simulation.html"


@dataclass(frozen=True)
class Making:
    """How the runs came about. sla_ms: the limit that attainment was counted against; infinite for none.  subject:
    model and machine, where they are known."""

    command: str = ""
    made_at: str = ""
    sla_ms: float = math.inf
    subject: str = ""

    @property
    def sla(self) -> str:
        """In words; none where there is no limit."""
        return format_ms(self.sla_ms) if math.isfinite(self.sla_ms) else ""

    def titled(self, kind: str) -> str:
        return f"{kind}: {self.subject}" if self.subject else kind


@dataclass(frozen=True)
class _Answer:
    """What the card says, and how it looks: nothing, "doubt" or "unmet"."""

    asked: str
    verdict: str
    sentence: str
    state: str
    beside: Sequence[str] = ()
    numbers: Sequence[KeyNumber] = field(default_factory=list)


_LOOKS = {"good": "", "doubt": "doubt", "bad": "unmet"}
_OF_AN_SLA = {"good": "SLA met", "doubt": "SLA likely met", "bad": "SLA missed"}
_OF_A_LOAD = {"good": "stable", "doubt": "stable, but not certain", "bad": "unstable"}
_OF_SLOS = {"good": "stable", "doubt": "stable, SLOs not met", "bad": "unstable"}


def write_page(folder: Path, rendered: Rendered) -> Written:
    """Store the page and its picture in `folder`. Raises TargetNotWritable."""
    return layout.write_rendered(folder, PAGE_NAME, rendered)


def policies_page(
    runs: Sequence[SimResult], system: System, made: Making, findings: Sequence[tuple[str, str]] = ()
) -> Rendered:
    """Batching policies. findings: claims of a study and what came out."""
    several = _several_rates(runs)
    title = "p99 over the rate" if several else "Median, 90th and 99th percentile of response times"
    answer = _policies_answer(runs, made)
    alt = f"{title} of {_policies(runs)}. {answer.sentence}"
    picture = Picture("simulation", title, alt, style.png(figures.runs_figure(runs)))
    over_rates = [tables.rates_table(runs)] if several else []
    by_class = [tables.classes_table(runs)] if any(run.by_class for run in runs) else []
    return _rendered(
        {
            "title": made.titled(f"Simulated batching policies on {' and '.join(path.name for path in system.paths)}"),
            "answer": answer,
            "heading": "Response times",
            "broad": False,
            "tables": [*over_rates, tables.runs_table(runs), *by_class],
            "findings": list(findings),
            "warnings": _nominal_paths(runs) + _notes(runs),
            "machine": paths_table(system),
        },
        picture,
        made,
    )


def engines_page(runs: Sequence[EngineResult], made: Making) -> Rendered:
    """Serving engines."""
    answer = _engines_answer(runs, made)
    title = "Time to first token, waiting requests and KV blocks"
    alt = f"{title} of the first replication of each run. {answer.sentence}"
    picture = Picture("simulation", title, alt, style.png(figures.engine_figure(runs)))
    return _rendered(
        {
            "title": made.titled("Simulated serving engines"),
            "answer": answer,
            "heading": "Latency of requests, and the engine",
            "broad": True,
            "tables": tables.engine_tables(runs),
            "findings": [],
            "warnings": _notes(runs),
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


def settings_table(runs: Sequence[EngineResult]) -> Table:
    """The limits of the engines, a column a distinct set of them."""
    kinds = {run.engine: run.limits for run in runs}
    names = list(dict.fromkeys(name for settings in kinds.values() for name in settings))
    rows = [(name, *(_plain(settings.get(name)) for settings in kinds.values())) for name in names]
    rows += [("requests", *(count(next(run.summary.requests for run in runs if run.engine == kind)) for kind in kinds))]
    return Table("Engines and their limits", ("limit", *kinds), rows)


def _policies(runs: Sequence[SimResult]) -> str:
    """Each once."""
    return ", ".join(dict.fromkeys(run.policy for run in runs))


def _several_rates(runs: Sequence[SimResult] | Sequence[EngineResult]) -> bool:
    return len({str(run.rate_per_s) for run in runs}) > 1


def _rendered(parts: Mapping[str, Any], picture: Picture, made: Making) -> Rendered:
    html = layout.template("simulated.html").render(
        **parts, pictures=[layout.shown(picture)], making=layout.making(made.command, made.made_at), notes=()
    )
    return Rendered(html, [picture])


def _policies_answer(runs: Sequence[SimResult], made: Making) -> _Answer:
    found = policies_verdict(runs, made.sla_ms)
    words = _OF_AN_SLA if made.sla and tables.frontier(runs) else _OF_A_LOAD
    asked = _asked([run.rate_per_s for run in runs], _policies(runs), made)
    best = _best(runs, made.sla_ms)
    beside = tables.differences(runs) if not _several_rates(runs) else []
    numbers = [] if best is None else _policy_numbers(best, made)
    return _Answer(asked, words[found.state], found.text, _LOOKS[found.state], beside, numbers)


def _best(runs: Sequence[SimResult], sla_ms: float) -> SimResult | None:
    """The lowest p99 at the highest rate that is carried, within the SLA where any is."""
    stable = tables.frontier(runs)
    within = [run for run in stable if run.latency["p99"].value <= sla_ms] or stable
    highest = max((tables.known_rate(run) for run in within), default=0.0)
    there = [run for run in within if tables.known_rate(run) == highest]
    return min(there, key=lambda run: run.latency["p99"].value, default=None)


def _policy_numbers(best: SimResult, made: Making) -> list[KeyNumber]:
    latency = best.latency
    numbers = [
        KeyNumber("p99", format_ms(latency["p99"].value), _interval(latency["p99"])),
        KeyNumber("Median", format_ms(latency["p50"].value), f"mean {format_ms(latency['mean'].value)}"),
        KeyNumber("Batch", number(best.batch_size["p50"], 3), "requests, the median of all batches"),
        *(
            KeyNumber(f"On {name}", format_percent(100 * share), "of the requests")
            for name, share in list(best.share.items())[1:]
        ),
    ]
    if best.slo_attainment is not None:
        within = made.sla and f"of responses within {made.sla}"
        numbers.append(KeyNumber("SLO attainment", format_percent(100 * best.slo_attainment), within))
    return numbers


def _engines_answer(runs: Sequence[EngineResult], made: Making) -> _Answer:
    names = ", ".join(dict.fromkeys(run.engine for run in runs))
    asked = _asked([run.rate_per_s for run in runs], names, made)
    found = engines_verdict(runs)
    words = _OF_A_LOAD if all(math.isnan(run.summary.slo_attainment) for run in runs) else _OF_SLOS
    stable = [run for run in runs if run.summary.stable]
    if not stable:
        return _Answer(asked, words[found.state], found.text, _LOOKS[found.state])
    highest = max(run.rate_per_s for run in stable)
    there = [run for run in stable if not run.rate_per_s < highest]
    best = min(there, key=lambda run: run.summary.latency["p99"].value).summary
    numbers = [
        KeyNumber(f"{title} p99", format_ms(times["p99"].value), f"{meaning}; mean {format_ms(times['mean'].value)}")
        for title, meaning, times in (
            ("TTFT", "time to first token", best.ttft),
            ("TPOT", "time per output token", best.tpot),
            ("Latency", "of the whole answer", best.latency),
        )
        if not math.isnan(times["p99"].value)
    ]
    busy = f"engine {format_percent(100 * best.utilisation)} busy"
    numbers.append(KeyNumber("Served", format_rate(best.throughput_per_s), busy))
    return _Answer(asked, words[found.state], found.text, _LOOKS[found.state], (), numbers)


def _asked(rates_per_s: Sequence[float], names: str, made: Making) -> str:
    rates = sorted(set(rates_per_s))
    if any(math.isnan(rate) for rate in rates):
        load = "A closed loop of users"
    else:
        load = " to ".join(format_rate(rate) for rate in dict.fromkeys((rates[0], rates[-1])))
    return f"{load}, {names}" + (f", SLA {made.sla}" if made.sla else "")


def _nominal_paths(runs: Sequence[SimResult]) -> list[dict[str, str]]:
    return [
        {
            "path": name,
            "message": "its times are nominal, not measured.",
            "remedy": "Measure with `latfit profile` on that machine, then `latfit fit`.",
        }
        for name in dict.fromkeys(name for run in runs for name in run.nominal)
    ]


def _notes(runs: Sequence[SimResult] | Sequence[EngineResult]) -> list[dict[str, str]]:
    notes = distinct(text for run in runs for text in run.notes)
    return [{"path": "", "message": text, "remedy": ""} for text in notes]


def _interval(p99: Interval) -> str:
    if math.isnan(p99.high - p99.low):
        return "too few requests for an interval"
    return f"{format_ms(p99.low, 4)} to {format_ms(p99.high, 4)} (95 %)"


def _path_row(path: ServicePath) -> tuple[str, ...]:
    times = path.typical_ms
    scatter = (
        "exponential" if path.exponential else "always the same" if path.noise is None else "as its measured steps"
    )
    source = "nominal" if path.nominal else "measured"
    largest = count(path.largest)
    return format_ms(float(times[1])), largest, format_ms(float(times[-1])), count(path.servers), scatter, source


def _plain(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return count(value) if isinstance(value, int | float) else str(value)
