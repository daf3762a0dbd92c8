"""Commands that call one verb of the library and print its answer. Docstrings are their help."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import latfit.api.requests as requests
from latfit.api.request import given_in, option, option_of
from latfit.cli.options import OutputOptions, answer, group_of_verbs, read_sources, subverb, verb
from latfit.cli.output import COLOURS, echo, note, print_answer, print_json, progress_bar, styled, suggest
from latfit.errors import FitNotUsable, Interrupted, LatfitError, SlaOutOfReach, WrongUsage
from latfit.units import count_text, format_ms, format_rate, number, parse_duration_ms

if TYPE_CHECKING:
    from latfit.api import Snapshot
    from latfit.metrics import Interval
    from latfit.profiling import Announcement, Progress

MAX_ONCE_MS = 10_000.0  # a single block of `watch` covers the window, but at most this

catalog = group_of_verbs("Step models of measured systems, by name.")
ledger = group_of_verbs("Compare planned with measured percentiles, run by run.")
simulate = group_of_verbs(
    """Simulate batching policies or a serving engine under a load.

    \b
    latfit simulate policies --policy three-stage --policy gpu-only --rate 500/s
    latfit simulate engine --fit gpu.fit.json --kv-blocks 2588 --rate 2/s \\
        --lengths 512:128
    latfit simulate study --nominal gpu:launch=8ms,slope=0.05ms \\
        --nominal amx:p50=2ms
    """
)


@subverb(catalog, "show")
def show_catalog(request: requests.CatalogRequest, output: OutputOptions) -> None:
    """List the systems of the catalogue, or show one.

    Use a name wherever a fit is accepted.

    Example: latfit plan --fit catalog:rtx4090/llama-3.1-8b --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms
    """
    answer("catalog", request, output)


@subverb(catalog, "add")
def add_to_catalog(request: requests.CatalogAddRequest, output: OutputOptions) -> None:
    """Add a fit to your own entries, in the folder that LATFIT_CATALOG names.

    Example: latfit catalog add trace.fit.json --name h100/llama-3.1-8b
    """
    answer("add_to_catalog", request, output)


@verb
def compare(request: requests.CompareRequest, output: OutputOptions) -> None:
    """Compare runs, with a verdict by phase and region.

    The first is the baseline. Phases and regions of (B, S) are compared in common cells, or by fits where none are
    common. Exit code 8 if one is slower by more than the tolerance, at 95 % confidence for all together, or if a load
    that is given (--rate, --lengths, --ttft, --tpot; one run a side) surely needs more replicas. One run of
    each version cannot separate the machine from the code: measure in turn, and compare all runs with --alternate.

    \b
    latfit compare before.parquet after.parquet --tolerance 3%
    latfit compare before.parquet after.parquet --rate 40/s --lengths 500:200 --tpot 50ms
    latfit compare a1.parquet b1.parquet a2.parquet b2.parquet --alternate
    """
    answer("compare_runs", request, output, busy="Comparing").check()


@verb
def doctor(request: requests.DoctorRequest, output: OutputOptions) -> None:
    """Say what this machine lacks, or what limits a running engine and what would help.

    Reads the engine's /metrics for ten seconds and diagnoses the bottleneck from counters. Without an address it looks
    for an engine at the usual ports of this machine. With a fit the effect of each setting is simulated, if the
    simulation agrees with the measured latencies.

    \b
    latfit doctor
    latfit doctor http://localhost:8000 --fit trace.fit.json
    """
    from latfit.api import examine_machine
    from latfit.metrics import LOCAL_PORTS, local_engine

    url = request.url or local_engine()
    if url is not None:
        answer("examine_server", replace(request, url=url), output, busy="Reading /metrics")
        return
    if given := sorted(given_in(request)):
        found = f"no engine answers at ports {', '.join(map(str, LOCAL_PORTS))} of this machine"
        where = option_of(requests.DoctorRequest, given[0])
        raise WrongUsage(found, where=where, remedy="Name one: http://localhost:8000.")
    print_answer(examine_machine(), output)


@verb
def evaluate(
    *,
    fit: requests.FitFile,
    force: bool = option("Proceed although the fit is of another machine or model.", False, expert=True),
    request: requests.ReadRequest,
    output: OutputOptions,
) -> None:
    """Score a fit on a trace that it was not fitted to.

    Errors overall and by phase, coverage of the prediction intervals, and steps outside the measured range. Exit code 4
    if the steps are of another machine.

    Example: latfit evaluate trace.fit.json other.parquet
    """
    from latfit.api import Fit

    found = Fit.load(fit).evaluate(read_sources(request, quiet=output.silent))
    print_answer(found, output)
    if not force:
        found.check_machine()


@verb
def export(
    request: requests.ExportRequest,
    *,
    out: Path | None = option("Folder for the files, or one file. Default: printed.", metavar="PATH"),
    output: OutputOptions,
) -> None:
    """Write a plan as settings of a serving engine, every value with its reason.

    \b
    latfit plan --rate 40/s --lengths 2000:300 --ttft 500ms --tpot 50ms --out plan.json
    latfit export vllm plan.json --out serving
    """
    from latfit.api import export as write_settings

    found = write_settings.of(request)
    if output.json:
        print_json(found.to_json())
    elif out is None:
        echo(str(found))
    for written in [] if out is None else found.save(out):
        note(f"Wrote {written}.", quiet=output.silent)


@subverb(ledger, "add")
def add_to_ledger(request: requests.LedgerAddRequest, output: OutputOptions) -> None:
    """Compare a measured run with its plan, and keep both in the ledger, once.

    The run must have the planned rate and output lengths to count. Requests without an answer are slower than any
    limit. Exit code 3 for a plan that misses its targets.

    \b
    latfit plan --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms --out plan.json
    latfit ledger add plan.json run.json
    """
    answer("add_to_ledger", request, output)
    note(f"Added to {request.ledger}", quiet=output.silent)


@subverb(ledger, "show")
def show_ledger(
    request: requests.LedgerRequest, *, report: requests.ReportFolder = None, output: OutputOptions
) -> None:
    """Show promises kept and broken, and how many stated intervals cover what was measured.

    Example: latfit ledger show --report ledger
    """
    answer("ledger", request, output, report=report)


@verb
def replay(request: requests.ReplayRequest, output: OutputOptions) -> None:
    """Run batching policies live on this machine and compare them with their simulation.

    Step times are measured and fitted first. Open-loop Poisson arrivals then go through the router to real decode steps
    on two cores, and the same arrivals are simulated. Exit code 4 if a run is not as predicted, or was disturbed.

    Example: latfit replay --policy three-stage --load 70% --duration 20s
    """
    if not answer("replay", request, output, busy="Measuring paths and policies").agrees:
        raise typer.Exit(FitNotUsable.exit_code)


@verb
def report(request: requests.ReportRequest, output: OutputOptions) -> None:
    """Write one self-contained HTML page, answer first, and its figures as PNG.

    Example: latfit report --sla 50ms
    """
    out = Path(request.out)
    if out.suffix.lower() in (".html", ".htm") and not out.is_dir():
        found = f"{out.name} would be a folder, with the page report.html in it"
        raise WrongUsage(found, where="--out", remedy="Name a folder: --out reports.")
    answer("report", request, output, busy="Writing the report")


@verb
def serve(request: requests.ServeRequest, output: OutputOptions) -> None:
    """Route each request to one of several running engines (vLLM, llama.cpp, SGLang) by a policy.

    Proxies OpenAI's /v1/completions and /v1/chat/completions, streams included; answers /v1/models, /health, /metrics.
    Contents of requests are not logged. SIGTERM or Ctrl-C drains running requests; a second one exits at once.

    \b
    latfit serve gpu=http://localhost:8000 cpu=http://localhost:8001 \\
      --times gpu=800ms --times cpu=3s
    """
    tokens = {"token": os.environ.get(requests.TOKEN), "engine_token": os.environ.get(requests.ENGINE_TOKEN)}
    given: dict[str, Any] = {name: token or None for name, token in tokens.items()}
    answer("serve", replace(request, **given, ready=lambda text: note(text, quiet=output.silent)), output)


@subverb(simulate)
def policies(request: requests.SimulateRequest, *, report: requests.PageFolder = None, output: OutputOptions) -> None:
    """Simulate batching policies on one or two execution paths.

    All policies meet the same random arrivals and noise (common random numbers).

    \b
    latfit simulate policies --policy three-stage --policy gpu-only --rate 500/s
    """
    if request.tokens_per_request is None and not (request.by_prompt or request.prompt_lengths or request.nominal):
        text = "Each request adds one token to a batch (decode); --tokens-per-request changes that."
        note(text, quiet=output.silent)
    found = _simulate("simulate", request, output, report)
    for text in found.skipped:
        note(f"Skipped a point of the optimal policy: {text}", quiet=output.silent)
    if request.log is not None:
        note(f"Wrote {request.log}", quiet=output.silent)
    if not found.stable:
        best = max(found.runs, key=lambda run: run.capacity_per_s or 0.0)
        capacity = "response times grow without end"
        if best.capacity_per_s:
            capacity = f"{best.policy} carries {format_rate(best.capacity_per_s, down=True)}"
        unmet = f"no policy carries {format_rate(best.rate_per_s or 0.0)}: {capacity}"
        remedy = "Lower the rate, add servers, or take a policy that uses both paths."
        raise SlaOutOfReach(unmet, where="--rate", remedy=remedy)


@subverb(simulate)
def engine(
    request: requests.SimulateEngineRequest, *, report: requests.PageFolder = None, output: OutputOptions
) -> None:
    """Simulate a serving engine token by token.

    Batching, KV cache, preemption and replicas are simulated with step times from a fit. First check the settings
    with `latfit validate` on a measured run.

    \b
    latfit simulate engine --fit gpu.fit.json --kv-blocks 2588 --rate 2/s \\
        --lengths 512:128
    """
    from latfit.reporting import brief

    found = _simulate("simulate_engine", request, output, report)
    if not found.stable:
        best = max(found.runs, key=lambda run: run.summary.throughput_per_s)
        served = format_rate(best.summary.throughput_per_s)
        unmet = f"no engine carries {format_rate(best.rate_per_s)}: {best.engine} serves {served}"
        where = "--rate" if request.arrivals is None else "--arrivals"
        raise SlaOutOfReach(unmet, where=where, remedy=brief.would_carry(found.runs))


@subverb(simulate)
def study(request: requests.StudyRequest, *, report: requests.PageFolder = None, output: OutputOptions) -> None:
    """Test claims of the literature on batching on this hardware.

    Runs every policy at ten loads up to the capacity of the main path.

    \b
    latfit simulate study --nominal gpu:launch=8ms,slope=0.05ms --nominal amx:p50=2ms
    """
    _simulate("simulate_study", request, output, report)


def _simulate(name: str, request: requests.SweepOptions, output: OutputOptions, report: Path | None) -> Any:
    try:
        found = answer(name, request, output, busy="Simulating", report=report)
    except KeyboardInterrupt:
        if request.out is None:
            raise
        kept = f"--resume --out {request.out} goes on from there."
        raise Interrupted("interrupted; the runs so far are kept", where=str(request.out), remedy=kept) from None
    if request.out is not None:
        note(f"Wrote {request.out}", quiet=output.silent)
    return found


@verb
def speculate(request: requests.SpeculateRequest, output: OutputOptions) -> None:
    """Say from which batch speculative decoding stops paying.

    Compares decode steps of B tokens with steps of B (1 + K) tokens, by a fit of the engine's steps; --drafts names a
    fit of the engine while it drafts: step times include drafting, and the acceptance is read from its trace.

    \b
    latfit speculate trace.fit.json --draft-tokens 3 --acceptance 0.7 --draft-cost 0.5ms
    latfit speculate plain.fit.json --drafts drafting.fit.json
    """
    answer("speculate", request, output)


@verb
def tune(request: requests.TuneRequest, output: OutputOptions) -> None:
    """Find settings of an engine that meet SLOs at a rate, and verify them: usually one or two restarts.

    Starts the engine on loopback, loads it below, at and above the rate, records its steps, plans settings, starts it
    again with them, and compares the measured TTFT and TPOT with the plan. What was started is stopped at the end.
    Exit code 5 if the SLOs are not met.

    \b
    latfit tune --rate 8/s --lengths 500:200 --ttft 500ms --tpot 50ms -- vllm serve MODEL
    """

    def ask(options: str) -> None:
        echo(f"Restart the engine with: {options}\nPress Enter when it is starting.", err=True)
        if not sys.stdin.readline():
            raise WrongUsage("the restart was not confirmed", where="stdin", remedy="Run it in a terminal.")

    if not request.dry_run:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engine that was started ends, as by Ctrl-C
    given: dict[str, Any] = {"token": os.environ.get(requests.ENGINE_TOKEN) or None, "restart": ask}
    found = answer("tune", replace(request, **given, progress=lambda text: note(text, quiet=output.silent)), output)
    if found.result.runs:
        note(f"Wrote {request.out}: traces, fit, plan, settings and logs.", quiet=output.silent)
    if not request.dry_run and not found.kept:
        remedy = "Lower the rate, allow longer times, or add replicas: latfit plan says how many."
        if found.result.settings and not found.result.tried:
            remedy = "Allow more --max-restarts or --budget, or try the planned settings."
        raise SlaOutOfReach("the SLOs are not met at this rate on one engine", where="--rate", remedy=remedy)


@verb
def validate(
    request: requests.ValidateRequest,
    *,
    strict: bool = option("Exit code 4 if simulated and measured differ.", False, panel="Comparison"),
    out: Path | None = option("File for the answer as JSON.", panel="Comparison"),
    figure: Path | None = option("PNG file for the main picture.", panel="Comparison"),
    output: OutputOptions,
) -> None:
    """Compare the measured TTFT, TPOT and latency of a serving run with its simulation.

    The same arrivals go through a simulated engine. Step times are fitted to a trace or log of the engine, which also
    has its settings; options take precedence.

    \b
    latfit validate server.log run.json --metrics-before 0.txt --metrics-after 1.txt
    latfit validate rtx4090_llama-3.1-8b.fit.json \\
        sample_traces/rtx4090_llama-3.1-8b_requests.csv --kv-blocks 2588
    """
    found = answer("validate", request, output, busy="Fitting and simulating", out=out, figure=figure)
    if not request.force:
        found.check_machine()
    if strict and not found.agrees:
        remedy = "Check how the engine was set up first (--kv-blocks), then give a trace of it, then --calibrate."
        raise FitNotUsable("simulated and measured differ", where=str(request.run), remedy=remedy)


@verb
def predict(request: requests.PredictRequest, output: OutputOptions) -> None:
    """Predict the latency of steps, with intervals.

    Every combination of -B and -S with S >= B, or the rows of --data. Steps outside the measured range are marked.

    Example: latfit predict rtx4090_llama-3.1-8b.fit.json -B 8 -B 32 -S 512
    """
    answer("predict_steps", request, output)


@verb
def watch(
    request: requests.WatchRequest,
    *,
    once: bool = option("Print one block and end: over the window, but 10 s at most.", False),
    output: OutputOptions,
) -> None:
    """Watch a running engine: SLO, percentiles, tokens, queue, KV cache, and what limits it.

    Percentiles come from the buckets of the server's histograms over the window. With a fit the capacity under the SLO
    is predicted. Ctrl-C ends it; without a terminal one block is printed.

    \b
    latfit watch http://localhost:8000 --ttft 500ms --tpot 50ms --fit trace.fit.json
    """
    from latfit.api import block_of, watch_server

    snapshots = watch_server.of(request)
    if not (once or output.json) and sys.stdout.isatty():
        _show_live(snapshots)
        return
    window_ms = parse_duration_ms(str(request.window), option="--window")
    note("Reading /metrics.", quiet=output.silent)
    print_answer(block_of(snapshots, min(window_ms, MAX_ONCE_MS) / 1e3), output)


def _show_live(snapshots: "Iterator[Snapshot]") -> None:
    from rich.console import Console, Group
    from rich.live import Live

    plain = bool(os.environ.get("NO_COLOR"))
    try:
        with Live(styled("Reading /metrics."), console=Console(), auto_refresh=False) as live:
            for found in snapshots:
                shown = styled(found.verdict, "" if plain else f"bold {COLOURS[found.state]}")
                live.update(Group(shown, *(styled(f"  {line}") for line in found.lines)), refresh=True)
    except KeyboardInterrupt:
        return


@verb
def record(request: requests.RecordRequest, output: OutputOptions) -> None:
    """Record a running engine by polling its /metrics; nothing is restarted.

    Writes the mean step of each window, which latfit fit reads, and the first and last text of /metrics. Then fits the
    windows, simulates the observed load, and compares with the server's own histograms.

    An address of ZeroMQ is that of an engine's forward-pass metrics: single steps.

    \b
    latfit record http://localhost:8000 --duration 10min --out trace.parquet
    latfit record zmq://localhost:20380
    """
    from latfit.api import fit_recording, record_server
    from latfit.record import is_stream

    next_fit = f"latfit fit {shlex.quote(str(request.out))}"
    if is_stream(request.url):
        answer("record_passes", request, output, busy="Recording")
        note(f"Wrote {request.out}. Next: {next_fit}", quiet=output.silent)
        return
    with progress_bar("Recording", quiet=output.silent) as advance:

        def show(at_s: float, whole_s: float, since: "Interval | None") -> None:
            last = None if since is None else since.last
            now = "" if last is None else f"{number(last.running)} running, {number(last.waiting)} waiting"
            advance(at_s, whole_s, now)

        windows = record_server.of(replace(request, progress=show))
    kept = f"What was recorded until then is kept in {request.out}."
    try:
        with progress_bar("Fitting and simulating", quiet=output.silent):
            fitted = fit_recording(windows)
    except KeyboardInterrupt:
        raise Interrupted("interrupted while fitting", remedy=f"{kept} {next_fit} fits it.") from None
    print_answer(fitted, output)
    fit_file = "" if fitted.fit is None else f", {fitted.fit_file}"
    note(f"Wrote {request.out}{fit_file} and both texts of /metrics.", quiet=output.silent)
    if not output.json and fitted.next:
        suggest(*fitted.next)
    if windows.interrupted:
        raise Interrupted("interrupted", remedy=kept)


@verb
def profile(
    request: requests.ProfileRequest,
    *,
    out: Path = option("Trace to write.", Path("trace.parquet"), panel="Run"),
    output: OutputOptions,
) -> None:
    """Measure transformer steps on this machine and write a trace.

    Every sample is kept. Ctrl-C keeps what was measured, and --resume goes on from there.

    \b
    latfit profile --budget 60s
    """
    from latfit.api import profile as measure

    def announce(what: "Announcement") -> None:
        threads = f" with {count_text(what.threads, 'thread')}" if what.threads else ""
        turns = f" in {what.processes} processes" if what.processes > 1 else ""
        cells, time = f"{what.cells} cells of {what.model}", format_ms(what.budget_s * 1e3)
        text = f"Measuring {cells} on {what.device}{threads}{turns}, {time}."
        note(text, quiet=output.silent)

    with progress_bar("Measuring", quiet=output.silent) as advance:

        def show(now: "Progress") -> None:
            counts = f"{now.cells_done} of {now.cells} cells known, {now.samples} samples"
            advance(min(now.elapsed_s, now.budget_s), now.budget_s, counts)

        found = measure.of(replace(request, out=out, progress=show, announce=announce))
    print_answer(found, output)
    if not output.json:
        echo(f"Wrote {out}.")
        suggest(f"latfit fit {shlex.quote(str(out))}")
    last = found.outcomes[-1].result
    if last.interrupted:
        elapsed_ms = sum(outcome.result.elapsed_s for outcome in found.outcomes) * 1e3
        kept = f"What was measured until then ({len(found.trace)} steps) is kept in {out}; --resume goes on."
        raise Interrupted(f"interrupted after {format_ms(elapsed_ms)}", remedy=kept)
    if last.stop == "device_failed":
        failure = next(warning for warning in last.warnings if warning.code == "device_failed")
        raise LatfitError(failure.message, remedy=f"{failure.remedy} What was measured before is kept in {out}.")
