"""Simulated runs as one page: which run is fastest, the picture, the tables, and what was simulated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from latfit.reporting import layout, style
from latfit.reporting.fit.tables import KeyNumber, Table
from latfit.reporting.format import count
from latfit.reporting.layout import Picture, Rendered, Written
from latfit.reporting.simulation import figures, tables
from latfit.reporting.simulation.brief import Verdict, distinct, engines_verdict, policies_verdict
from latfit.simulation import EngineResult, ServicePath, SimResult, System
from latfit.units import format_ms, format_percent, format_rate, number

PAGE_NAME = "simulation.html"


@dataclass(frozen=True)
class Making:
    """How the runs came about."""

    command: str = ""
    made_at: str = ""
    sla_ms: float = math.inf  # the limit that attainment was counted against; infinite for none
    subject: str = ""  # model and machine, where they are known

    @property
    def sla(self) -> str:
        """The SLA in words; empty without one."""
        return format_ms(self.sla_ms) if math.isfinite(self.sla_ms) else ""

    def titled(self, kind: str) -> str:
        return f"{kind}: {self.subject}" if self.subject else kind


STYLES = {"good": "", "doubt": "doubt", "bad": "unmet"}
_OF_AN_SLA = {"good": "SLA met", "doubt": "SLA likely met", "bad": "SLA missed"}
_OF_A_LOAD = {"good": "stable", "doubt": "stable, but not certain", "bad": "unstable"}
_OF_SLOS = {"good": "stable", "doubt": "stable, SLOs not met", "bad": "unstable"}


def write_page(folder: Path, rendered: Rendered) -> Written:
    """Store the page and its picture in `folder`. Raises TargetNotWritable."""
    return layout.write_rendered(folder, PAGE_NAME, rendered)


def policies_page(
    runs: Sequence[SimResult], system: System, made: Making, findings: Sequence[tuple[str, str]] = ()
) -> Rendered:
    """Return the page of batching policies. findings: claims of a study and what came out."""
    several = len({str(run.rate_per_s) for run in runs}) > 1
    names = ", ".join(dict.fromkeys(run.policy for run in runs))
    verdict, best = policies_verdict(runs, made.sla_ms), tables.best_policies(runs, made.sla_ms)
    title = "p99 over the rate" if several else "Median, 90th and 99th percentile of response times"
    return render_page(
        made,
        f"Simulated batching policies on {' and '.join(path.name for path in system.paths)}",
        verdict,
        answer={
            "asked": _asked(runs, names, made),
            "verdict": (_OF_AN_SLA if made.sla and best else _OF_A_LOAD)[verdict.state],
            "beside": [] if several else tables.differences(runs),
            "numbers": _policy_numbers(best[0], made) if best else [],
        },
        picture=("simulation", title, f"{title} of {names}.", figures.runs_figure(runs)),
        heading="Response times",
        tables=[
            *([tables.rates_table(runs)] if several else []),
            tables.runs_table(runs),
            *([tables.classes_table(runs)] if any(run.by_class for run in runs) else []),
        ],
        findings=list(findings),
        warnings=[*_nominal_paths(runs), *_notes(runs)],
        machine=paths_table(system),
    )


def engines_page(runs: Sequence[EngineResult], made: Making) -> Rendered:
    """Return the page of serving engines."""
    verdict, (best, _) = engines_verdict(runs), tables.best_engine(runs)
    title = "Time to first token, waiting requests and KV blocks"
    words = _OF_A_LOAD if all(math.isnan(run.summary.slo_attainment) for run in runs) else _OF_SLOS
    return render_page(
        made,
        "Simulated serving engines",
        verdict,
        answer={
            "asked": _asked(runs, ", ".join(dict.fromkeys(run.engine for run in runs)), made),
            "verdict": words[verdict.state],
            "numbers": [] if best is None else _engine_numbers(best),
        },
        picture=("simulation", title, f"{title} of the first replication of each run.", figures.engine_figure(runs)),
        heading="Latency of requests, and the engine",
        broad=True,
        tables=tables.engine_tables(runs),
        warnings=_notes(runs),
        machine=settings_table(runs),
    )


def render_page(
    made: Making,
    kind: str,
    verdict: Verdict,
    answer: dict[str, Any],
    picture: tuple[str, str, str, Figure] | None,
    **parts: Any,
) -> Rendered:
    """Fill the template of simulations. picture: file name without its ending, title, words in its place, figure."""
    pictures = []
    if picture is not None:
        stem, title, alt, figure = picture
        pictures = [Picture(stem, title, f"{alt} {verdict.text}", style.png(figure))]
    html = layout.template("simulated.html").render(
        **{"broad": False, "findings": [], "warnings": [], "machine": None, "notes": (), **parts},
        title=made.titled(kind),
        answer={"sentence": verdict.text, "state": STYLES[verdict.state], "beside": (), **answer},
        pictures=[layout.shown(each) for each in pictures],
        making=layout.making(made.command, made.made_at),
    )
    return Rendered(html, pictures)


def paths_table(system: System) -> Table:
    """Show the paths as they were simulated."""
    rows = [(path.name, part, *_path_row(path)) for path, part in zip(system.paths, ("main", "side"), strict=False)]
    columns = ("path", "part", "one request", "largest batch", "its time", "servers", "times", "source")
    return Table("Execution paths", columns, rows, words=("part", "times", "source"))


def _path_row(path: ServicePath) -> tuple[str, ...]:
    times = path.typical_ms
    noise = "exponential" if path.exponential else "always the same" if path.noise is None else "as its measured steps"
    source = "nominal" if path.nominal else "measured"
    largest = count(path.largest)
    return format_ms(float(times[1])), largest, format_ms(float(times[-1])), count(path.servers), noise, source


def settings_table(runs: Sequence[EngineResult]) -> Table:
    """Show the limits of the engines, a column a distinct set of them."""
    kinds = {run.engine: run.limits for run in runs}
    names = list(dict.fromkeys(name for settings in kinds.values() for name in settings))
    rows = [(name, *(_plain(settings.get(name)) for settings in kinds.values())) for name in names]
    rows += [("requests", *(count(next(run.summary.requests for run in runs if run.engine == kind)) for kind in kinds))]
    return Table("Engines and their limits", ("limit", *kinds), rows)


def _plain(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return count(value) if isinstance(value, int | float) else str(value)


def _policy_numbers(best: SimResult, made: Making) -> list[KeyNumber]:
    latency, p99 = best.latency, best.latency["p99"]
    interval = "too few requests for an interval"
    if not math.isnan(p99.high - p99.low):
        interval = f"{format_ms(p99.low, 4)} to {format_ms(p99.high, 4)} (95 %)"
    numbers = [
        KeyNumber("p99", format_ms(p99.value), interval),
        KeyNumber("Median", format_ms(latency["p50"].value), f"mean {format_ms(latency['mean'].value)}"),
        KeyNumber("Batch", number(best.batch_size["p50"], 3), "requests, the median of all batches"),
    ]
    for name, share in list(best.share.items())[1:]:
        numbers.append(KeyNumber(f"On {name}", format_percent(100 * share), "of the requests"))
    if best.slo_attainment is not None:
        within = made.sla and f"of responses within {made.sla}"
        numbers.append(KeyNumber("SLO attainment", format_percent(100 * best.slo_attainment), within))
    return numbers


def _engine_numbers(best: EngineResult) -> list[KeyNumber]:
    found = best.summary
    numbers = [
        KeyNumber(f"{title} p99", format_ms(times["p99"].value), f"{meaning}; mean {format_ms(times['mean'].value)}")
        for title, meaning, times in (
            ("TTFT", "time to first token", found.ttft),
            ("TPOT", "time per output token", found.tpot),
            ("Latency", "of the whole answer", found.latency),
        )
        if not math.isnan(times["p99"].value)
    ]
    busy = f"engine {format_percent(100 * found.utilisation)} busy"
    return [*numbers, KeyNumber("Served", format_rate(found.throughput_per_s), busy)]


def _asked(runs: Sequence[SimResult] | Sequence[EngineResult], names: str, made: Making) -> str:
    rates = sorted({run.rate_per_s for run in runs})
    load = " to ".join(format_rate(rate) for rate in dict.fromkeys((rates[0], rates[-1])))
    if any(math.isnan(rate) for rate in rates):
        load = "A closed loop of users"
    return f"{load}, {names}" + (f", SLA {made.sla}" if made.sla else "")


def _nominal_paths(runs: Sequence[SimResult]) -> list[dict[str, str]]:
    remedy = "Measure with `latfit profile` on that machine, then `latfit fit`."
    names = dict.fromkeys(name for run in runs for name in run.nominal)
    return [{"path": name, "message": "its times are nominal, not measured.", "remedy": remedy} for name in names]


def _notes(runs: Sequence[SimResult] | Sequence[EngineResult]) -> list[dict[str, str]]:
    notes = distinct(text for run in runs for text in run.notes)
    return [{"path": "", "message": text, "remedy": ""} for text in notes]
