"""`speculate`: from which batch speculative decoding stops paying."""

import math

from latfit import reporting
from latfit.api.answer import PlainAnswer
from latfit.api.fits import as_fit
from latfit.api.quantities import duration
from latfit.api.request import verb
from latfit.api.requests import SpeculateRequest
from latfit.errors import BadInput, WrongUsage
from latfit.model import FitResult
from latfit.planning import SpeculationPlan, plan_speculation
from latfit.simulation import known_settings
from latfit.trace import engine_facts
from latfit.units import count_text, format_ms, format_percent, number


@verb(SpeculateRequest)
def speculate(request: SpeculateRequest) -> PlainAnswer:
    """Say from which batch speculative decoding stops paying.

    Draft tokens and acceptance come from the recorded engine unless they are given. Raises WrongUsage, BadInput,
    FitNotUsable.
    """
    plain = as_fit(request.fit).result
    drafting = plain if request.drafts is None else as_fit(request.drafts).result
    k, acceptance = _recorded(drafting)
    k = request.draft_tokens or k
    if request.acceptance is not None:
        acceptance = request.acceptance, 0.0
    if k is None:
        raise WrongUsage("no number of draft tokens is known", where="--draft-tokens", remedy="Give it, such as 3.")
    if acceptance is None or not 0 <= acceptance[0] <= 1:
        wrong = "no acceptance is known" if acceptance is None else f"{acceptance[0]:g} is no probability"
        remedy = "Give the probability that a draft token is accepted, or a fit of an engine that drafts as --drafts."
        raise WrongUsage(wrong, where="--acceptance", remedy=remedy)
    draft_ms = 0.0 if request.draft_cost is None else duration(request.draft_cost, "--draft-cost")
    found = plan_speculation(plain, drafting, k, acceptance, draft_ms, request.context, request.seed)
    if found is None:
        where = "--fit" if request.drafts is None else "--drafts"
        lacking = f"no decode step of {1 + k} tokens a request was measured"
        raise BadInput(lacking, where=where, remedy="Fit steps with more tokens.")
    return _describe(found)


def _describe(found: SpeculationPlan) -> PlainAnswer:
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
    return PlainAnswer(
        found,
        verdict,
        "bad" if high < 1 else "doubt" if low <= 1 or open_end else "good",
        [f"Acceptance {format_percent(100 * found.acceptance)}{error}, {tokens}"],
        reporting.Table("", columns, rows),
    )


def _recorded(fit: FitResult) -> tuple[int | None, tuple[float, float] | None]:
    """Return draft tokens of a recorded engine, and their acceptance with its standard error; None if unknown."""
    counts = fit.data.more.get("engine_counts") or {}
    facts = engine_facts([("", fit.provenance.get("trace") or {})], counts)
    settings = known_settings(facts).values
    k = settings.get("draft_tokens")
    if not k or "acceptance" not in settings:
        return k, None
    a, accepted = float(settings["acceptance"]), facts.did.get("accepted_tokens", 0.0)
    looked_at = accepted / a if a > 0 else facts.did.get("decode_requests", 1.0)
    return int(k), (a, math.sqrt(max(a * (1 - a), 0.0) / max(looked_at, 1.0)))
