"""Simulated runs as one page: which run is fastest, the picture, the tables, and what was simulated."""

import math
from collections.abc import Sequence

from latfit.reporting.format import count
from latfit.reporting.layout import Making, Page, Rendered, Section, draw_picture, render_page
from latfit.reporting.simulation import figures, tables
from latfit.reporting.simulation.brief import distinct, engines_verdict, policies_verdict
from latfit.reporting.table import Card, KeyNumber, Table, make_table
from latfit.simulation import EngineResult, ServicePath, SimResult, System, Times
from latfit.units import format_ms

OF_AN_SLA = {"good": "SLA met", "doubt": "SLA likely met", "bad": "SLA missed"}
OF_A_LOAD = {"good": "stable", "doubt": "stable, but not certain", "bad": "unstable"}
OF_SLOS = {"good": "stable", "doubt": "stable, SLOs not met", "bad": "unstable"}
NOMINAL = "Measure with `latfit profile` on that machine, then `latfit fit`."


def policies_page(
    runs: Sequence[SimResult], system: System, made: Making, findings: Sequence[tuple[str, str]] = ()
) -> Rendered:
    """Return the page of batching policies. findings: claims of a study and what came out."""
    verdict, best = policies_verdict(runs, made.sla_ms), tables.best_policies(runs, made.sla_ms)
    words = OF_AN_SLA if made.sla and best else OF_A_LOAD
    limit = f", SLA {made.sla}" if made.sla else ""
    several = len({str(run.rate_per_s) for run in runs}) > 1
    classes = [(f"{tables.named(run)}, {tables.rate_text(run)}", each) for run in runs for each in run.by_class]
    shown = [*([tables.rates_table(runs)] if several else []), tables.runs_table(runs)]
    claims = [Section("Claims", "findings", sentences=[": ".join(each) for each in findings], open=True)]
    nominal = dict.fromkeys(name for run in runs for name in run.nominal)
    page = Page(
        made.titled(f"Simulated batching policies on {' and '.join(path.name for path in system.paths)}"),
        made,
        Card(
            ", ".join(dict.fromkeys(run.policy for run in runs)) + limit,
            words[verdict.state],
            verdict.text,
            verdict.state,
            numbers=_key_numbers([("Response", best[0].latency)]) if best else [],
        ),
        pictures=[draw_picture("simulation", verdict.text, figures.runs_figure(runs))],
        warnings=[*((f"{name}: its times are nominal, not measured.", NOMINAL) for name in nominal), *_notes(runs)],
        sections=[
            *(claims if findings else []),
            Section("Runs", "runs", [*shown, *([tables.classes_table(classes)] if classes else [])], open=True),
            Section("What was simulated", "machine", [paths_table(system)]),
        ],
    )
    return render_page(page)


def engines_page(runs: Sequence[EngineResult], made: Making) -> Rendered:
    """Return the page of serving engines."""
    verdict, (best, _) = engines_verdict(runs), tables.best_engine(runs)
    words = OF_A_LOAD if all(math.isnan(run.summary.slo_attainment) for run in runs) else OF_SLOS
    engines = ", ".join(dict.fromkeys(run.engine for run in runs))
    numbers = [] if best is None else _key_numbers(tables.measured_times(best.summary))
    page = Page(
        made.titled("Simulated serving engines"),
        made,
        Card(engines, words[verdict.state], verdict.text, verdict.state, numbers=numbers),
        pictures=[draw_picture("simulation", verdict.text, figures.engine_figure(runs))],
        warnings=_notes(runs),
        sections=[
            Section("Runs", "runs", tables.engine_tables(runs), open=True),
            Section("What was simulated", "machine", [settings_table(runs)]),
        ],
    )
    return render_page(page)


def paths_table(system: System) -> Table:
    """Show the paths as they were simulated."""

    def noise(path: ServicePath) -> str:
        return (
            "exponential" if path.exponential else "always the same" if path.noise is None else "as its measured steps"
        )

    return make_table(
        "Execution paths",
        system.paths,
        ("path", "name"),
        ("one request", lambda path: float(path.typical_ms[1]), format_ms),
        ("largest batch", "largest", count),
        ("its time", lambda path: float(path.typical_ms[-1]), format_ms),
        ("servers", "servers", count),
        ("times", noise),
        ("source", lambda path: "nominal" if path.nominal else "measured"),
        words=("times", "source"),
    )


def settings_table(runs: Sequence[EngineResult]) -> Table:
    """Show the limits of the engines, a column a distinct set of them."""
    kinds = {run.engine: {**run.limits, "requests": run.summary.requests} for run in runs}
    names = dict.fromkeys(name for settings in kinds.values() for name in settings)
    rows = [(name, *(_plain(settings.get(name, "")) for settings in kinds.values())) for name in names]
    return Table("Engines and their limits", ("limit", *kinds), rows)


def _plain(value: object) -> str:
    return f"{value:,}" if type(value) in (int, float) else str(value)


def _key_numbers(times: Sequence[tuple[str, Times]]) -> list[KeyNumber]:
    """Return the p99 of each time with its interval."""
    numbers = []
    for title, each in times:
        p99, mean = each["p99"], f"mean {format_ms(each.mean)}"
        known = not math.isnan(p99.high - p99.low)
        interval = f"{format_ms(p99.low, 4)} to {format_ms(p99.high, 4)} (95 %); {mean}" if known else mean
        numbers.append(KeyNumber(f"{title} p99", format_ms(p99.value), interval))
    return numbers


def _notes(runs: Sequence[SimResult] | Sequence[EngineResult]) -> list[tuple[str, str]]:
    return [(text, "") for text in distinct(text for run in runs for text in run.notes)]
