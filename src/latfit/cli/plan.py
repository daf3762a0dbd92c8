"""`latfit plan`: what fits under an SLA, how to run a load within it, from which batch the GPU pays."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    LawsOnlyOption,
    PercentileOption,
    QuietOption,
    SeedOption,
    TokensOption,
    verb,
)
from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms

if TYPE_CHECKING:
    from latfit.planning import Plan, Wishes


@dataclass(frozen=True)
class PlanOptions:
    """The options as typed; None where one was left out."""

    percentile: PercentileOption = 99.0
    rate: Annotated[str | None, typer.Option("--rate", help="Requests that arrive, such as 500/s.")] = None
    arrivals: Annotated[
        Path | None,
        typer.Option("--arrivals", help="Recorded arrivals (t_s), or a rate over time (t_s, rate_per_s)."),
    ] = None
    window: Annotated[str | None, typer.Option("--window", help="Windows to cut recorded arrivals into.")] = None
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas that share the load.")] = 1
    tokens_per_request: TokensOption = None
    context: Annotated[
        float | None, typer.Option("--context", help="Cached tokens of a request; without it the trace's median.")
    ] = None
    max_batch: Annotated[int | None, typer.Option("--max-batch", help="Largest batch of the GPU.")] = None
    transfer: Annotated[
        str | None, typer.Option("--transfer", help="What moving a request to the GPU takes, such as 0.2ms.")
    ] = None
    wait: Annotated[
        str | None, typer.Option("--wait", help="Expected wait for the GPU; without it what the rate makes it.")
    ] = None
    launch_share: Annotated[
        float, typer.Option("--launch-share", help="Share of the launch cost in a step from which B2 counts.")
    ] = 0.5
    ttft: Annotated[str | None, typer.Option("--ttft", help="Target for the first token of a prompt.")] = None
    tpot: Annotated[str | None, typer.Option("--tpot", help="Target between tokens; without it the SLA.")] = None
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt, for --ttft.")] = 512
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="Objective weights (minimised): p99=1,mean=0.5,throughput=0.1."),
    ] = None
    laws_only: LawsOnlyOption = False
    seed: SeedOption = 0


def wishes_of(typed: PlanOptions) -> "Wishes":
    """The options, checked. Raises WrongUsage, BadInput."""
    from latfit.planning import ServingTargets, Wishes, parse_objective, read_load

    if typed.rate is not None and typed.arrivals is not None:
        raise WrongUsage(
            "a rate and recorded arrivals contradict each other",
            where="--rate, --arrivals",
            remedy="Give one of them.",
        )
    if typed.window is not None and typed.arrivals is None:
        raise WrongUsage("a window without recorded arrivals", where="--window", remedy="Give --arrivals FILE as well.")
    if typed.objective is not None and typed.rate is None and typed.arrivals is None:
        raise WrongUsage("an objective needs a load", where="--objective", remedy="Give --rate or --arrivals.")
    window = _duration(typed.window, "--window")
    return Wishes(
        rate=None if typed.rate is None else parse_rate_per_ms(typed.rate, option="--rate"),
        load=None if typed.arrivals is None else read_load(typed.arrivals, window),
        replicas=typed.replicas,
        context=typed.context,
        max_batch=typed.max_batch,
        transfer_ms=_duration(typed.transfer, "--transfer", zero=True) or 0.0,
        wait_ms=_duration(typed.wait, "--wait", zero=True),
        launch_share=typed.launch_share,
        serving=ServingTargets(_duration(typed.ttft, "--ttft"), _duration(typed.tpot, "--tpot"), typed.prompt_tokens),
        objective=None if typed.objective is None else parse_objective(typed.objective),
        laws_only=typed.laws_only,
        seed=typed.seed,
    )


def _duration(text: str | None, option: str, *, zero: bool = False) -> float | None:
    """Milliseconds; where `zero`, a plain 0 needs no unit."""
    if text is None:
        return None
    if zero and text.strip() in ("0", "0ms"):
        return 0.0
    return parse_duration_ms(text, option=option)


@verb
def plan(
    sla: Annotated[str, typer.Option("--sla", help="Latency SLA: per step, or per request when --rate is given.")],
    typed: PlanOptions = PlanOptions(),
    out: Annotated[Path | None, typer.Option("--out", help="Folder for pictures of the plan.")] = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what fits under a latency limit, and how to run a load within it.

    Without a rate: which steps meet the SLA (S at B, B at S), thresholds, engine settings. With a rate, responses with
    their waiting, by running the queue: which strategy, T_cut, capacity, replicas, what would change it; the decision
    is verified in the event simulator.
    """
    from latfit.cli.output import note, print_json
    from latfit.hardware import read_hardware
    from latfit.planning import make_plan

    sla_ms = parse_duration_ms(sla, option="--sla")
    wishes = wishes_of(typed)
    profile = read_hardware(hardware)
    if out is not None:
        from latfit.files import make_folder

        make_folder(out)
    decided = make_plan(
        profile, sla_ms, percentile=typed.percentile, tokens_per_request=typed.tokens_per_request or 1, wishes=wishes
    )
    if typed.tokens_per_request is None:
        note("Planned for decode, one token a request; --tokens-per-request changes that.", quiet=quiet or json)
    if json:
        print_json(decided.to_json())
    else:
        print_plan(decided)
    if out is not None:
        from latfit.report import write_figures

        for target in write_figures(out, decided, profile, wishes):
            note(f"Drew {target}.", quiet=quiet or json)
    if not decided.feasible:
        raise SlaOutOfReach(decided.binding, where=f"--sla {sla}", remedy=decided.remedy)


def print_plan(decided: "Plan") -> None:
    """The decision in the first three lines, then what it rests on."""
    from latfit.cli.output import print_table, print_warnings
    from latfit.report import decision_lines, plan_tables

    for line in decision_lines(decided):
        typer.echo(line)
    print_warnings(decided.notes)
    for table in plan_tables(decided):
        typer.echo("")
        print_table(table)
