"""`latfit fit`: fit a model to traces and check it: one fit a system, with its execution path and its file."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from latfit.api.request import Option, Request, shared
from latfit.api.requests import FitEachRequest, Hardware, ModelOptions, ReportFolder
from latfit.cli.options import OutputOptions, read_sources, verb
from latfit.cli.output import echo, note, print_answer, print_json, print_messages, print_table, progress_bar, say
from latfit.errors import FitNotUsable

if TYPE_CHECKING:
    from latfit.api import Fit
    from latfit.messages import Message as LatfitWarning
    from latfit.trace import CleanTrace

ASSUMED_PATH = "gpu"
"""Steps that say nothing of where they ran come from an engine's log, and engines run on GPUs."""
FEW = 2
"""Fits that are shown one after another; more of them are rows of a table."""
SLA_MS, QUICKER = 20.0, 0.05
"""The SLA that a plan is suggested for, and the share of steps that it is to leave room for at least."""
MOST = 20
"""Rows of that table, and systems without a usable fit that are named; --verbose shows all."""


@dataclass(frozen=True)
class TargetOptions(Request):
    """Which systems are fitted, and where the fits go."""

    PANEL = "Systems and files"
    SHOWN = "each out hardware force report"
    each: Annotated[bool, Option("Fit every system (hardware, model, tp) in the file by itself.")] = False
    out: Annotated[Path | None, Option("The fit file; without it NAME.fit.json in this folder.")] = None
    hardware: Hardware = Path("hardware.json")
    force: Annotated[
        bool,
        Option("Enter the fit into the profile anyway, also over a measurement of another system."),
    ] = False
    report: ReportFolder = None
    strict: Annotated[bool, Option("Exit code 4 if the fit has warnings.")] = False

    def file(self, source: str, label: str) -> Path:
        """NAME.fit.json, or NAME.LABEL.fit.json where a source holds several systems."""
        out = self.out or Path(f"{_without_endings(source) or 'trace'}.fit.json")
        if not label:
            return out
        return out.with_name(f"{out.name.removesuffix('.json').removesuffix('.fit')}.{label}.fit.json")


@dataclass(frozen=True)
class Stored:
    """A fit with the label of its system, its file, its path in the hardware profile (None where it belongs to no
    machine's), and why it is kept out of that."""

    fit: "Fit"
    label: str
    file: Path
    path: str | None
    kept_out: "LatfitWarning | None"

    @property
    def shown(self) -> str:
        """What people call its system: its labels as they stand in the source, which a file's name cannot always."""
        return " ".join(filter(None, self.fit.system.values())) or self.label

    @property
    def refused(self) -> tuple[str, str] | None:
        """What is wrong with it, and what to do; None where it may be used."""
        status = self.fit.result.status
        if status.code == "failed":
            return self.fit.warnings[0].message, self.fit.warnings[0].remedy
        if not status.ok:
            return status.sentence, status.remedy
        return (self.kept_out.message, self.kept_out.remedy) if self.kept_out else None


@verb
def fit(request: FitEachRequest, targets: TargetOptions, output: OutputOptions) -> None:
    """Fit a latency model to a trace and check it.

    Writes NAME.fit.json and enters the fit into the hardware profile.

    \b
    latfit fit sample_traces/rtx4090_llama-3.1-8b.parquet
    latfit fit server.log --report reports
    """
    from latfit.api import fit_each
    from latfit.trace import check_one_machine, reading_notes

    steps = read_sources(request, quiet=output.silent, time=request.time or "auto")
    if not targets.each:
        check_one_machine(steps)
    _check_targets(steps, targets)
    several_machines = targets.each and any(set(system) - {"path"} for system, _ in steps.systems)
    no_machine = several_machines and "{" not in (request.path or "")
    stored: dict[str, Stored] = {}
    if not no_machine:
        told = f"The fit goes into {targets.hardware}, which `latfit plan` reads: --hardware names another profile."
        note(told, quiet=output.silent)

    def keep(label: str, found: "Fit") -> None:
        made = Stored(
            found,
            label if found.system else "",
            targets.file(steps.sources[0].name, label if found.system else ""),
            None if no_machine else found.path or ASSUMED_PATH,
            None if targets.force else found.kept_out(),
        )
        if found.ok:
            found.save(made.file)
        # Last, so that a fit whose writing Ctrl-C stops is neither counted nor entered into the hardware profile.
        stored[label] = made

    try:
        with progress_bar("Fitting", quiet=output.silent) as advance:
            fits = fit_each.of(shared(FitEachRequest, _of_model(request), source=steps, made=keep, progress=advance))
    except KeyboardInterrupt:
        done = sum(each.fit.ok for each in stored.values())
        note(f"Stopped: {done:,} fits of {len(steps.systems):,} systems are written.", quiet=output.silent)
        raise
    finally:
        replaced = _enter(stored, targets.hardware, force=targets.force)
    made = [stored[label] for label in fits]
    if output.json:
        documents = {each.label: each.fit.to_json() for each in made}
        print_json(next(iter(documents.values())) if len(documents) == 1 else {"fits": documents})
    else:
        _print(made, [*reading_notes(steps), *replaced], targets.hardware, output)
    if targets.report is not None:
        from latfit.api import report

        note(report(targets.hardware, targets.report).summary(), quiet=output.silent)
    _raise_where_unusable(made, strict=targets.strict, where=steps.name)


def _of_model(request: FitEachRequest) -> ModelOptions:
    """What is asked of the model alone: the steps are read already."""
    return shared(ModelOptions, request)


def _without_endings(source: str) -> str:
    """The name of a source without its format and compression; other dots are its own: llama-3.1-8b.csv.gz."""
    file = Path(source)
    return Path(file.stem).stem if file.suffix in (".gz", ".zst") else file.stem


def _check_targets(steps: "CleanTrace", targets: TargetOptions) -> None:
    """Unwritable targets and a broken hardware profile are found before the work, not after it."""
    from latfit.files import check_writable
    from latfit.hardware import read_hardware
    from latfit.trace import system_labels

    for label in system_labels([system for system, _ in steps.systems]):
        check_writable(targets.file(steps.sources[0].name, label))
    check_writable(targets.hardware)
    if targets.hardware.exists():
        read_hardware(targets.hardware)


def _enter(stored: dict[str, Stored], hardware: Path, *, force: bool) -> Sequence[str]:
    """The fits that may be used into the hardware profile, all at once; what they replaced there. Those that only force
    may enter are kept out."""
    from latfit.hardware import ExecutionPath, add_path

    paths = {
        label: ExecutionPath(each.path, each.fit.result)
        for label, each in stored.items()
        if each.fit.ok and each.path is not None and each.kept_out is None
    }
    if not paths:
        return ()
    entered = add_path(hardware, *paths.values(), force=force)
    for label, path in paths.items():
        stored[label] = replace(stored[label], kept_out=entered.refused.get(path.name))
    return entered.replaced


def _print(stored: Sequence[Stored], notes: Sequence[str], hardware: Path, output: OutputOptions) -> None:
    if len(stored) > (MOST if output.verbose else FEW):
        _print_overview(stored, verbose=output.verbose)
    else:
        for each in stored:
            _print_fit(each, output, several=len(stored) > 1)
    print_messages(notes, kind="note")
    usable = [each for each in stored if each.fit.ok]
    if not usable:
        return
    files = ", ".join(str(each.file) for each in usable[:FEW])
    more = f" and {len(usable) - FEW:,} more" if len(usable) > FEW else ""
    paths = list(dict.fromkeys(each.path for each in usable if each.path and each.kept_out is None))
    entered = ", ".join(paths[:MOST]) + (f" and {len(paths) - MOST:,} more" if len(paths) > MOST else "")
    if not entered and any(each.kept_out for each in usable):
        say(f"Wrote {files}{more}. Not entered into {hardware}.")
        return
    if not entered:
        say(f"Wrote {files}{more}. Not in {hardware}: name a path for each with --path '{{hardware}}-tp{{tp}}'.")
        return
    assumed = "" if usable[0].fit.path else " (assumed; --path cpu if it is not)"
    say(f"Wrote {files}{more}; in {hardware} as path{'s' * (len(paths) > 1)} {entered}{assumed}.")
    place = "" if hardware == Path("hardware.json") else f" --hardware {shlex.quote(str(hardware))}"
    say(f"Next: latfit plan --sla {_within_reach(usable[0].fit)}{place}")


def _within_reach(fit: "Fit") -> str:
    """An SLA for steps that the fitted machine can keep: 20ms, or what is twice its quicker steps, in round numbers."""
    import math

    import numpy as np

    from latfit.units import format_ms

    rows = fit.rows()
    wanted = SLA_MS if rows is None else max(SLA_MS, 2 * float(np.quantile(rows["T_ms"], QUICKER)))
    power = 10.0 ** math.floor(math.log10(wanted))
    return format_ms(next(step * power for step in (1, 2, 5, 10) if step * power >= wanted)).replace(" ", "")


def _print_overview(stored: Sequence[Stored], *, verbose: bool) -> None:
    """Fits of many systems, a row each, those that cannot be used last and with their reason."""
    from latfit.api import data_line
    from latfit.reporting import fits_table

    refused = [each for each in stored if each.refused]
    ordered = [*(each for each in stored if not each.refused), *refused]
    shown = ordered if verbose or len(stored) <= MOST else ordered[:MOST]
    print_table(fits_table([(each.shown, each.fit.result) for each in shown]))
    if len(shown) < len(stored):
        say(f"... and {len(stored) - len(shown):,} more: --verbose shows them.")
    facts = stored[0].fit.result.data.to_json()
    say(data_line({**facts, "rows_used": sum(each.fit.result.data.rows_used or 0 for each in stored)}))
    reasons = [f"{each.shown}: {each.refused[0]}" for each in refused if each.refused]
    print_messages(reasons if verbose else reasons[:MOST])


def _print_fit(stored: Stored, output: OutputOptions, *, several: bool) -> None:
    """A fit that can be used as an answer; of another the rows that were read."""
    if several:
        echo(f"\n{stored.shown}")
    if stored.fit.ok:
        print_answer(stored.fit, output, "bad" if stored.kept_out else None)
        return
    for line in stored.fit.lines:
        say(line)


def _raise_where_unusable(fits: Sequence[Stored], *, strict: bool, where: str) -> None:
    refused = [(each, each.refused) for each in fits if each.refused]
    if strict:
        refused += [
            (each, (f"--strict: {each.fit.needs_action[0].message}", each.fit.needs_action[0].remedy))
            for each in fits
            if not each.refused and each.fit.needs_action
        ]
    if not refused:
        return
    first, (found, remedy) = refused[0]
    others = f" (and {len(refused) - 1:,} more of {len(fits):,} fits)" if len(refused) > 1 else ""
    raise FitNotUsable(f"{found}{others}", where=f"{where} ({first.shown})" if first.label else where, remedy=remedy)
