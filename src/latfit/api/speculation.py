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
from latfit.planning import plan_speculation
from latfit.simulation import known_settings
from latfit.trace import engine_facts


@verb(SpeculateRequest)
def speculate(request: SpeculateRequest) -> PlainAnswer:
    """Say from which batch speculative decoding stops paying.

    Draft tokens and acceptance come from the recorded engine unless given. Raises WrongUsage, BadInput, FitNotUsable.
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
    verdict, lines, table = reporting.describe_speculation(found)
    return PlainAnswer(found, verdict.text, verdict.state, lines, [table])


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
