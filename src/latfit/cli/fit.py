"""`latfit fit`: one fit a system, with its execution path and its file; `latfit demo`."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from latfit.api.request import Request, given_in, option, shared
from latfit.api.requests import FitEachRequest, Hardware, ModelOptions, ReportFolder, Seed
from latfit.cli.options import OutputOptions, Quiet, read_sources, verb
from latfit.cli.output import (
    echo,
    note,
    print_answer,
    print_json,
    print_messages,
    print_table,
    progress_bar,
    say,
    suggest,
)
from latfit.errors import FitNotUsable, WrongUsage
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.api import Fit
    from latfit.messages import Message
    from latfit.model import FitResult


ASSUMED_PATH = "gpu"  # steps without a path come from an engine's log, and engines run on GPUs
MAX_IN_FULL = 2  # fits that are shown one after another; more of them are rows of a table
MAX_ROWS = 20  # of that table, without --verbose
SLA_MS = 20.0  # smallest SLA that is suggested


@dataclass(frozen=True)
class TargetOptions(Request):
    PANEL = "Systems and files"
    SHOWN = "each out hardware force report"
    each: bool = option("Fit every system (hardware, model, tp) in the file by itself.", False)
    out: Path | None = option("The fit file; without it NAME.fit.json in this folder.")
    hardware: Hardware = Path("hardware.json")
    force: bool = option("Enter the fit into the profile anyway, also over a measurement of another system.", False)
    report: ReportFolder = None
    strict: bool = option("Exit code 4 if the fit has warnings.", False)

    def file(self, source: str, label: str) -> Path:
        """Return NAME.fit.json, or NAME.LABEL.fit.json for one system of several."""
        name = Path(source)
        stem = Path(name.stem).stem if name.suffix in (".gz", ".zst") else name.stem
        out = self.out or Path(f"{stem or 'trace'}.fit.json")
        if not label:
            return out
        return out.with_name(f"{out.name.removesuffix('.json').removesuffix('.fit')}.{label}.fit.json")


@dataclass
class Stored:
    """A fit with its file, its path in the profile, and why it is kept out."""

    fit: "Fit"
    label: str
    file: Path
    path: str | None
    kept_out: "Message | None"

    @property
    def system(self) -> str:
        return " ".join(filter(None, self.fit.system.values())) or self.label

    @property
    def entered(self) -> bool:
        return self.fit.ok and self.path is not None and self.kept_out is None

    @property
    def problem(self) -> tuple[str, str] | None:
        """What is wrong, and what to do."""
        status = self.fit.result.status
        why = self.fit.warnings[0] if status.code == "failed" else self.kept_out
        if not status.ok and status.code != "failed":
            return status.sentence, status.remedy
        return None if why is None else (why.message, why.remedy)


@verb
def fit(request: FitEachRequest, targets: TargetOptions, output: OutputOptions) -> None:
    """Fit a latency model to a trace and check it.

    Writes NAME.fit.json and enters the fit into the hardware profile.

    \b
    latfit fit sample_traces/rtx4090_llama-3.1-8b.parquet
    latfit fit server.log --report reports
    """
    from latfit.api import fit_each
    from latfit.files import check_writable
    from latfit.hardware import HardwareProfile
    from latfit.trace import check_one_machine, reading_notes, system_labels

    steps = read_sources(request, quiet=output.silent, time=request.time or "auto")
    if not targets.each:
        check_one_machine(steps)
    for label in system_labels([system for system, _ in steps.systems]):
        check_writable(targets.file(steps.sources[0].name, label))
    check_writable(targets.hardware)
    if targets.hardware.exists():
        HardwareProfile.read(targets.hardware)  # a broken one is found before the work
    several_machines = targets.each and any(set(system) - {"path"} for system, _ in steps.systems)
    no_machine = several_machines and "{" not in (request.path or "")
    stored: dict[str, Stored] = {}
    if not no_machine:
        text = f"The fit goes into {targets.hardware}, which `latfit plan` reads: --hardware names another profile."
        note(text, quiet=output.silent)

    def keep(label: str, found: "Fit") -> None:
        own_label = label if found.system else ""
        file = targets.file(steps.sources[0].name, own_label)
        path = None if no_machine else found.path or ASSUMED_PATH
        made = Stored(found, own_label, file, path, None if targets.force else found.kept_out())
        if found.ok:
            found.save(file)
        # Last, so that Ctrl-C during the writing leaves the fit out of the profile.
        stored[label] = made

    try:
        with progress_bar("Fitting", quiet=output.silent) as advance:
            model = shared(ModelOptions, request)  # the steps are read already
            fits = fit_each.of(shared(FitEachRequest, model, source=steps, made=keep, progress=advance))
    except KeyboardInterrupt:
        done = sum(each.fit.ok for each in stored.values())
        note(f"Stopped: {done:,} fits of {len(steps.systems):,} systems are written.", quiet=output.silent)
        raise
    finally:
        assumed = not {"hardware", "path"} & (given_in(targets) | given_in(request))
        notes = _enter(list(stored.values()), targets.hardware, force=targets.force, assumed=assumed)
    made = [stored[label] for label in fits]
    if output.json:
        documents = {each.label: each.fit.to_json() for each in made}
        print_json(next(iter(documents.values())) if len(documents) == 1 else {"fits": documents})
    else:
        _print(made, [*reading_notes(steps), *notes], targets.hardware, output)
    if targets.report is not None:
        from latfit.api import report

        paths = targets.hardware if any(each.entered for each in made) else made[0].file
        note(report(paths, targets.report).summary(), quiet=output.silent)
    _check_usable(made, strict=targets.strict, where=steps.name)


def _enter(stored: Sequence[Stored], hardware: Path, *, force: bool, assumed: bool) -> "Sequence[Message | str]":
    """Enter usable fits into the profile at once; return what they replaced, and which paths another system has.

    assumed: neither the profile nor the path was named, so that a path of another system is no error.
    """
    from msgspec.structs import replace

    from latfit.hardware import ExecutionPath, add_path

    usable = [each for each in stored if each.entered]
    if not usable:
        return ()
    found = add_path(hardware, *(ExecutionPath(each.path or "", each.fit.result) for each in usable), force=force)
    notes: list[Message | str] = [*found.replaced]
    for each in usable:
        each.kept_out = found.refused.get(each.path or "")
        if each.kept_out is not None and assumed:
            command = f"latfit hardware add NAME {shlex.quote(str(each.file))}"
            notes.append(replace(each.kept_out, remedy=f"To enter it as another path: {command}"))
            each.path = each.kept_out = None
    return notes


def _print(stored: Sequence[Stored], notes: "Sequence[Message | str]", hardware: Path, output: OutputOptions) -> None:
    if len(stored) > (MAX_ROWS if output.verbose else MAX_IN_FULL):
        _print_overview(stored, verbose=output.verbose)
    else:
        for each in stored:
            if len(stored) > 1:
                echo(f"\n{each.system}")
            if each.fit.ok:
                print_answer(each.fit, output, "bad" if each.kept_out else None)
            for line in [] if each.fit.ok else each.fit.lines:
                say(line)
    print_messages(notes, kind="note")
    usable = [each for each in stored if each.fit.ok]
    if not usable:
        return
    files = _listed([str(each.file) for each in usable], MAX_IN_FULL)
    entered = _listed([str(each.path) for each in usable if each.entered], MAX_ROWS)
    if entered:
        assumed = "" if usable[0].fit.path else " (assumed; --path cpu if it is not)"
        say(f"Wrote {files}; in {hardware} as path{'s' * (', ' in entered)} {entered}{assumed}.")
    elif len(usable) == 1 or any(each.kept_out for each in usable):
        say(f"Wrote {files}. Not entered into {hardware}.")
    else:
        say(f"Wrote {files}. Not in {hardware}: name a path for each with --path '{{hardware}}-tp{{tp}}'.")
    if entered or (len(usable) == 1 and not usable[0].kept_out):
        place = shlex.quote(str(hardware if entered else usable[0].file))
        suggest(f"latfit plan --sla {feasible_sla(usable[0].fit.result)} --hardware {place}")


def _listed(names: Sequence[str], most: int) -> str:
    different = list(dict.fromkeys(names))
    return ", ".join(different[:most]) + (f" and {len(different) - most:,} more" if len(different) > most else "")


def feasible_sla(fit: "FitResult", least_ms: float = SLA_MS) -> str:
    """Return twice the smallest measured step in round numbers, at least `least_ms`."""
    import numpy as np

    smallest_ms = fit.latency_ms(*(np.array([fit.domain[name][0]], dtype=float) for name in "BS"))
    wanted_ms = max(least_ms, 2 * float(smallest_ms[0]))
    power = 10.0 ** math.floor(math.log10(wanted_ms))
    return format_ms(next(step * power for step in (1, 2, 5, 10) if step * power >= wanted_ms)).replace(" ", "")


def _print_overview(stored: Sequence[Stored], *, verbose: bool) -> None:
    from latfit.reporting import steps

    ordered = sorted(stored, key=lambda each: each.problem is not None)
    shown = ordered if verbose else ordered[:MAX_ROWS]
    print_table(steps.fits_table([(each.system, each.fit.result) for each in shown]))
    if len(shown) < len(stored):
        say(f"... and {len(stored) - len(shown):,} more: --verbose shows them.")
    facts = stored[0].fit.result.data.to_json()
    say(steps.data_line({**facts, "rows_used": sum(each.fit.result.data.rows_used or 0 for each in stored)}))
    reasons = [f"{each.system}: {each.problem[0]}" for each in ordered if each.problem]
    print_messages(reasons if verbose else reasons[:MAX_ROWS])


def _check_usable(fits: Sequence[Stored], *, strict: bool, where: str) -> None:
    """Raise FitNotUsable for the first unusable fit, or one with a warning if strict."""
    problems = [(each, each.problem) for each in fits if each.problem]
    if strict:
        warned = [(each, each.fit.needs_action[0]) for each in fits if not each.problem and each.fit.needs_action]
        problems += [(each, (f"--strict: {first.message}", first.remedy)) for each, first in warned]
    if problems:
        first, (found, remedy) = problems[0]
        others = f" (and {len(problems) - 1:,} more of {len(fits):,} fits)" if len(problems) > 1 else ""
        where = f"{where} ({first.system})" if first.label else where
        raise FitNotUsable(f"{found}{others}", where=where, remedy=remedy)


@dataclass(frozen=True)
class DemoOptions(Request):
    PANEL = "Demo"
    out: Path = option("Output folder.", Path("reports/demo"), metavar="DIR")
    budget: str = option("Time to spend measuring.", "60s")
    seed: Seed = 0
    quiet: Quiet = False


@verb
def demo(options: DemoOptions) -> None:
    """Profile, fit, plan and report on this machine.

    The main workflow end to end, without extras.

    \b
    latfit demo --out reports/demo
    """
    from latfit.api import Fit
    from latfit.files import make_folder
    from latfit.hardware import HardwareProfile

    out, seed, budget = options.out, options.seed, options.budget
    parse_duration_ms(budget, option="--budget")
    make_folder(out)
    trace, hardware, fitted = out / "trace.parquet", out / "hardware.json", out / "trace.fit.json"
    for path in HardwareProfile.read(hardware).paths.values() if hardware.exists() else ():
        if path.fit.data.source != str(trace.resolve()):  # the fit would replace it
            remedy = "Give the demo a folder of its own with --out."
            raise WrongUsage(f"path {path.name} in it is not of a demo", where=str(hardware), remedy=remedy)
    quietly = ["--quiet"] if options.quiet else []
    measuring = ["--budget", budget, "--out", trace, "--seed", seed, *quietly]
    _do(1, f"latfit profile --budget {budget}", "profile", *measuring)
    # A busy machine may allow no good fit; the demo continues with it, and its warnings, to the end.
    fitting = [trace, "--hardware", hardware, "--out", fitted, "--seed", seed, "--force", *quietly]
    _do(2, "latfit fit trace.parquet", "fit", *fitting)
    sla = feasible_sla(Fit.load(fitted).result, least_ms=0.0)
    planning = ["--sla", sla, "--hardware", hardware, *quietly]
    _do(3, f"latfit plan --sla {sla}", "plan", *planning, continues=True)
    _do(4, f"latfit report --sla {sla}", "report", *planning, "--out", out)
    echo(f"\nOpen {out / 'report.html'} in a browser.")


def _do(number: int, shown: str, *arguments: object, continues: bool = False) -> None:
    """Run a command as a user would type it; an exit code other than 0 ends the demo unless `continues`."""
    from latfit.cli.app import run

    echo(f"\n[{number}/4] {shown}", bold=True)
    code = run([str(argument) for argument in arguments])
    if code and not continues:
        raise typer.Exit(code)
