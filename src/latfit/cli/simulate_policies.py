"""`latfit simulate policies`: what batching policies make of a load on this hardware."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from latfit.cli.options import OutputOptions, TokensOption, only_with
from latfit.cli.output import note
from latfit.cli.simulate_options import MachineOptions, ResultOptions, RunOptions, SweepOptions, simulated
from latfit.errors import SlaOutOfReach
from latfit.units import format_rate

KNOWN = "gpu-only|fixed|window|marginal-cost|three-stage|cutoff|optimal|split|deadline"
"""Policies that come with latfit; plug-ins may add others."""


@dataclass(frozen=True)
class PolicyOptions:
    """Policies and their settings; see `latfit.api.simulations.SETTINGS`."""

    panel: ClassVar[str] = "Policies"
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar=KNOWN, help="Batching policy; the first is the baseline. Repeatable."),
    ] = None
    batch: Annotated[int | None, typer.Option("--batch", help="fixed: batch size.")] = None
    window: Annotated[str | None, typer.Option("--window", help="window: batching timeout, such as 2ms.")] = None
    t_cut: Annotated[
        str | None,
        typer.Option("--t-cut", help="cutoff, three-stage: queueing timeout before falling back to the CPU tier."),
    ] = None
    b1: Annotated[int | None, typer.Option("--b1", help="three-stage: smallest batch for the GPU.")] = None
    max_batch: Annotated[int | None, typer.Option("--max-batch", help="Largest batch on the main path.")] = None
    rule: Annotated[
        Literal["amortised", "literal", "total-delay"] | None,
        typer.Option("--rule", hidden=True, help="marginal-cost: the rule."),
    ] = None
    longest: Annotated[
        str | None, typer.Option("--longest", hidden=True, help="marginal-cost, split: longest wait for more requests.")
    ] = None
    merge_below: Annotated[
        int | None, typer.Option("--merge-below", hidden=True, help="split: fewer requests than this wait for more.")
    ] = None
    ageing: Annotated[
        str | None,
        typer.Option("--ageing", hidden=True, help="Priority ageing: waiting time worth one class, such as 50ms."),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Those that are given."""
        return {name: value for name, value in asdict(self).items() if name != "policy" and value is not None}


@dataclass(frozen=True)
class LoadOptions:
    """The requests; shared with engines."""

    panel: ClassVar[str] = "Load"
    rate: Annotated[
        list[str] | None, typer.Option("--rate", help="Arrival rate, such as 500/s. Repeatable: one run each.")
    ] = None
    arrivals: Annotated[
        Path | None, typer.Option("--arrivals", help="Recorded requests, in any format that is read; scaled by --rate.")
    ] = None
    arrival_process: Annotated[
        str,
        typer.Option(
            "--arrival-process",
            "--law",
            hidden=True,
            help="poisson; gamma:CV (bursty if CV > 1); bursts:TIMES:SHARE:LENGTH, such as bursts:4:0.1:1s.",
        ),
    ] = "poisson"
    users: Annotated[
        int | None,
        typer.Option("--users", hidden=True, help="Closed loop: users with one request each at a time."),
    ] = None
    think: Annotated[str, typer.Option("--think", hidden=True, help="Closed loop: mean think time.")] = "1s"
    load_curve: Annotated[
        Path | None,
        typer.Option("--load-curve", hidden=True, help="Table (t_s, rate_per_s) of a rate that varies and repeats."),
    ] = None
    request_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            hidden=True,
            help="NAME:SHARE[:DEADLINE], most urgent first: chat:0.3:50ms; of engines also chat:0.3:ttft=1s,tpot=50ms.",
        ),
    ] = None
    prompt_lengths: Annotated[
        Path | None,
        typer.Option("--prompt-lengths", hidden=True, help="Recorded requests to draw the token lengths from."),
    ] = None

    def asked(self) -> dict[str, Any]:
        """As parameters of the library."""
        found = asdict(self)
        return found | {"classes": found.pop("request_class") or ()}


@dataclass(frozen=True)
class MoreLoadOptions:
    """What engines do not take."""

    panel: ClassVar[str] = "Load"
    tokens_per_request: TokensOption = None
    by_prompt: Annotated[
        bool, typer.Option("--by-prompt", hidden=True, help="With --arrivals: a request's tokens are its prompt's.")
    ] = False


@dataclass(frozen=True)
class SweepLogOptions:
    """Many runs, until they are precise; the event log of one."""

    panel: ClassVar[str] = "Run"
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Settings to vary: 'rate=100/s,200/s; t-cut=1ms,2ms'. Repeatable."),
    ] = None
    precision: Annotated[
        float | None,
        typer.Option("--precision", hidden=True, help="Simulate until p99 is known within this share, such as 0.01."),
    ] = None
    log: Annotated[
        Path | None, typer.Option("--log", hidden=True, help="Event log of the first 1,000 requests of run 1 (CSV).")
    ] = None


@only_with("simulate")
def policies(
    policy: PolicyOptions = PolicyOptions(),
    load: LoadOptions = LoadOptions(),
    more: MoreLoadOptions = MoreLoadOptions(),
    machine: MachineOptions = MachineOptions(),
    run: RunOptions = RunOptions(),
    sweep: SweepLogOptions = SweepLogOptions(),
    results: ResultOptions = ResultOptions(),
    table: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Batching policies on one or two execution paths.

    All policies meet the same random arrivals, so that differences between them are surer than the numbers themselves.

    \b
    latfit simulate policies --policy three-stage --policy gpu-only --rate 500/s
    """
    from latfit.api import simulate, values_of

    if more.tokens_per_request is None and not (more.by_prompt or load.prompt_lengths or machine.nominal):
        text = "Each request adds one token to a batch (decode); --tokens-per-request changes that."
        note(text, quiet=output.silent)
    running = table.running()
    found = simulated(
        lambda advance: simulate(
            policy=policy.policy or ["gpu-only"],
            settings=policy.settings(),
            vary=values_of(sweep.sweep),
            precision=sweep.precision,
            log=sweep.log,
            running=running,
            out=table.out,
            resume=table.resume,
            progress=advance,
            **load.asked(),
            **asdict(more),
            **machine.asked(),
            **asdict(run),
        ),
        results,
        output,
        table.out,
    )
    for text in found.skipped:
        note(f"Skipped a point of the optimal policy: {text}", quiet=output.silent)
    if sweep.log is not None:
        note(f"Wrote {sweep.log}", quiet=output.silent)
    if not found.stable:
        best = max(found.runs, key=lambda run: run.capacity_per_s or 0.0)
        capacity = best.capacity_per_s
        carried = (
            f"{best.policy} carries {format_rate(capacity, down=True)}"
            if capacity
            else "response times grow without end"
        )
        raise SlaOutOfReach(
            f"no policy carries {format_rate(best.rate_per_s or 0.0)}: {carried}",
            where="--rate",
            remedy="Lower the rate, add servers, or take a policy that uses both paths.",
        )
