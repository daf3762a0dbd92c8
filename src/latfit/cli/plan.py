"""`latfit plan`: what fits under an SLA, and from which batch the GPU pays."""

from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    PercentileOption,
    QuietOption,
    TokensOption,
)
from latfit.errors import SlaOutOfReach
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.plan.result import Plan


def plan(
    sla: Annotated[str, typer.Option("--sla", help="Latency that a step must meet, such as 20ms.")],
    percentile: PercentileOption = 99.0,
    tokens_per_request: TokensOption = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what fits under a latency limit.

    Which steps meet the SLA (S at B, B at S), and the thresholds B1 and B2 between two execution paths.
    """
    from latfit.cli.output import note, print_json
    from latfit.hardware.profile import read_hardware
    from latfit.plan.decide import make_plan

    sla_ms = parse_duration_ms(sla, option="--sla")
    decided = make_plan(
        read_hardware(hardware), sla_ms, percentile=percentile, tokens_per_request=tokens_per_request or 1
    )
    if tokens_per_request is None:
        note("Planned for decode, one token a request; --tokens-per-request changes that.", quiet=quiet or json)
    if json:
        print_json(decided.to_json())
    else:
        print_plan(decided)
    if not decided.feasible:
        raise SlaOutOfReach(
            decided.binding,
            where=f"--sla {sla}",
            remedy=f"Ask for at least {format_ms(decided.fastest_ms, 4)}, or plan for a lower --percentile.",
        )


def print_plan(decided: "Plan") -> None:
    """The decision in the first three lines, then the tables."""
    from latfit.cli.output import print_table
    from latfit.report import tables

    typer.echo(decided.answer)
    typer.echo(_threshold("B1", decided.B1.value, decided.B1.reason))
    typer.echo(_threshold("B2", decided.B2.value, decided.B2.reason))
    typer.echo(_threshold("T_cut", None, decided.T_cut.reason))
    for text in decided.notes:
        typer.echo(f"  ! {text}")
    for table in (tables.tokens_at_batch(decided), tables.batch_at_tokens(decided)):
        if table.rows:
            typer.echo("")
            print_table(table)


def _threshold(name: str, value: int | None, reason: str) -> str:
    return f"{name}: {reason}" if value is None else f"{name} = {value}: {reason}"
