"""Plans compared: with drafts and without, before a change of step times and after."""

import math

from latfit.planning import SpeculationPlan, Upgrade
from latfit.reporting.simulation.brief import Verdict
from latfit.reporting.table import State, Table
from latfit.units import count_text, format_ms, format_percent, number


def upgrade_table(upgrade: Upgrade) -> Table:
    rows = [
        (
            each.step,
            f"{each.B:,}",
            f"{each.S:,}",
            format_ms(each.before_ms),
            _signed_ms(each.change_ms),
            "-" if each.interval_ms is None else " to ".join(map(_signed_ms, each.interval_ms)),
            _signed_ms(each.fixed_ms),
            _signed_ms(each.growing_ms),
        )
        for each in upgrade.changes
    ]
    smallest = f"at B = {upgrade.changes[0].smallest_batch:,}"
    columns = ("step", "B", "S", "before", "change", "95 % interval", smallest, "beyond it")
    return Table(f"Steps at this load, {upgrade.source}", columns, rows, words=("step",))


def _signed_ms(value_ms: float) -> str:
    return f"{'-' if value_ms < 0 else '+'}{format_ms(abs(value_ms))}"


def describe_speculation(found: SpeculationPlan) -> tuple[Verdict, list[str], Table]:
    """Return from which batch drafts stop paying, the acceptance, and a table by batch."""
    drafts, largest = count_text(found.draft_tokens, "draft token"), f"{found.largest_batch:,}"
    ends = [f"{end:,.0f}" if math.isfinite(end) else f"beyond {largest}" for end in found.stops_interval]
    open_end = found.stops_at is None and math.isfinite(found.stops_interval[0])
    if found.stops_at is not None:
        verdict = f"{drafts} a step stop paying from {found.stops_at:,} requests on (95 %: {ends[0]} to {ends[1]})."
    elif open_end:
        verdict = f"{drafts} a step likely pay up to {largest} requests, with 95 % only below {ends[0]}."
    else:
        verdict = f"{drafts} a step pay up to the largest measured batch, {largest} requests."
    low, high = found.rows[0].interval
    reach = 1.96 * found.acceptance_se
    shares = [format_percent(100 * min(max(found.acceptance + side, 0.0), 1.0)) for side in (-reach, reach)]
    error = f" (95 %: {shares[0]} to {shares[1]})" if reach else " (given)"
    cost = f", {format_ms(found.draft_ms)} to draft a token"
    if not found.draft_ms:
        cost = ". The steps are taken to include drafting: give --draft-cost if they do not"
    tokens = f"{number(found.tokens_per_step)} tokens per request and step{cost}."
    rows = [
        (
            f"{each.B:,}",
            *map(format_ms, (each.step_ms, each.draft_step_ms)),
            *map(number, (each.tokens_per_s, each.draft_tokens_per_s)),
            f"{each.speedup:.2f}",
            f"{each.interval[0]:.2f} to {each.interval[1]:.2f}",
        )
        for each in found.rows
    ]
    columns = ("B", "step", "draft step", "tokens/s", "draft tokens/s", "speed-up", "95 % interval")
    state: State = "bad" if high < 1 else "doubt" if low <= 1 or open_end else "good"
    lines = [f"Acceptance {format_percent(100 * found.acceptance)}{error}, {tokens}"]
    return Verdict(verdict, state), lines, Table("", columns, rows)
