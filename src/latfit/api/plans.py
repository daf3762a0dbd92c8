"""`plan`, `step_budget`, `speculate`: what to do under an SLA."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit import reporting
from latfit.api.answer import PlainAnswer, Planned, data_frame
from latfit.api.fits import as_fit
from latfit.api.hardware import check_one_model, note_unread_context, profile_of
from latfit.api.quantities import duration, percent, rate as per_ms, transfer as transfers
from latfit.api.reading import TABLE, table_of
from latfit.api.request import verb
from latfit.api.requests import Duration, PlanRequest, SpeculateRequest, StepBudgetRequest
from latfit.errors import BadInput, WrongUsage
from latfit.hardware import HardwareProfile
from latfit.model import FitResult
from latfit.planning import (
    Load,
    Plan as PlanRecord,
    PlanOptions,
    StepBudget,
    load_of,
    make_plan,
    parse_objective,
    plan_speculation,
    read_load,
    step_budget as budget_of,
)
from latfit.trace import engine_facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Plan(Planned):
    """What to do under an SLA; DataFrames in ms and per second."""

    result: PlanRecord
    hardware: HardwareProfile = field(default_factory=HardwareProfile)
    request: PlanOptions = field(default_factory=PlanOptions)

    @property
    def answer(self) -> str:
        return self.result.answer

    @property
    def B1(self) -> int | None:
        """Batch from which the GPU is at least as fast as the CPU."""
        return self.result.B1.value

    @property
    def B2(self) -> int | None:
        """Batch that reaches half of the path's best throughput."""
        return self.result.B2.value

    @property
    def T_cut_ms(self) -> float | None:
        """Longest wait for the GPU before a request goes to the CPU; None: no limit."""
        return None if self.result.T_cut is None else self.result.T_cut.value

    @property
    def capacity_per_s(self) -> float | None:
        """Highest rate within the SLA on one replica."""
        return None if self.result.capacity is None else self.result.capacity.sustainable_per_s

    @property
    def why_in_doubt(self) -> list[str]:
        return list(self.result.why_in_doubt)

    @property
    def replicas(self) -> int | None:
        """Replicas that the rate needs; None if no number serves it."""
        return None if self.result.capacity is None else self.result.capacity.replicas

    @cached_property
    def settings(self) -> Any:
        """DataFrame: settings of serving engines under their own names."""
        return data_frame(
            {"engine": engine, "setting": name, "value": value}
            for engine, flags in self.result.engines.items()
            for name, value in flags.items()
        )

    @cached_property
    def limits(self) -> Any:
        """DataFrame: tokens of steps within the SLA by path and B; a missing S_max: any number."""
        return data_frame(row.to_json() for row in self.result.S_at_B)

    @cached_property
    def strategies(self) -> Any:
        """DataFrame: a row a strategy."""
        asked = "typical" if self.result.percentile is None else f"p{self.result.percentile:g}"
        return data_frame(
            {
                "strategy": row.name,
                f"{asked}_ms": row.percentile_ms,
                "mean_ms": row.mean_ms,
                "headroom_pct": None if row.margin is None else 100 * row.margin,
                "capacity_per_s": row.sustainable_per_s,
                "stability_limit_per_s": row.rate_limit_per_s,
                "replicas": row.replicas,
                "selected": row.chosen,
                "verdict": row.verdict,
            }
            for row in self.result.strategies
        )

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        return reporting.plan_tables.show_plan(self.result)

    def plot(self) -> "Figure":
        return reporting.plan_figures.plan_figure(self.result, self.hardware, self.request)


@verb(PlanRequest)
def plan(request: PlanRequest) -> Plan:
    """Decide for a latency SLA: per step, or per response (waiting included) where a load is given.

    A plan that nothing can meet has feasible=False. Raises BadInput, FitNotUsable, WrongUsage.
    """
    limit_ms = duration(request.sla, "--sla")
    tokens, objective = request.tokens_per_request or 1, request.objective
    if isinstance(objective, Mapping):
        objective = ",".join(f"{name}={weight}" for name, weight in objective.items())
    fixed_ms, ms_per_token = (0.0, 0.0) if request.transfer is None else transfers(request.transfer)
    made = PlanOptions(
        rate=None if request.rate is None else per_ms(request.rate),
        load=_load(request),
        replicas=request.replicas,
        context=request.context,
        max_batch=request.max_batch,
        transfer_ms=fixed_ms + ms_per_token * tokens,
        wait_ms=None if request.wait is None else duration(request.wait, "--set wait", zero=True),
        ttft_ms=_optional(request.ttft, "--ttft"),
        tpot_ms=_optional(request.tpot, "--tpot"),
        prompt_tokens=request.prompt_tokens,
        objective=None if objective is None else parse_objective(objective),
        laws_only=request.laws_only,
        seed=request.seed,
    )
    profile = profile_of(request.paths)
    if request.rate is not None and request.tokens_per_request is None:
        _check_lengths(profile)
    note_unread_context(profile, request.context)
    if not request.force:
        check_one_model(profile)
    found = make_plan(
        profile, limit_ms, percentile=percent(request.percentile), tokens_per_request=tokens, request=made
    )
    return Plan(found, profile, made)


def _check_lengths(profile: HardwareProfile) -> None:
    """Raise WrongUsage if step times depend on request lengths, which are not given."""
    first, *others = profile.paths.values()
    if not others and not first.nominal and (first.fit.knows_prefill or first.fit.reads_context):
        found = f"how long requests are is not known, and steps of {first.name} depend on it"
        remedy = "Give --lengths 1000:250 --ttft 1s --tpot 50ms, or --tokens-per-request 1 for one token each."
        raise WrongUsage(found, where="--rate", remedy=remedy)


@verb(StepBudgetRequest)
def step_budget(request: StepBudgetRequest) -> StepBudget:
    """Tabulate the tokens that fit into a step within an SLA, by number of requests.

    `.table` is a DataFrame (B, S_max), `.trim(least, wanted)` cuts a batch. Raises SlaOutOfReach, WrongUsage.
    """
    limit_ms = duration(request.sla, "--sla")
    paths, name = profile_of(request.paths).paths, request.path
    if name is None and len(paths) == 1:
        (name,) = paths
    if name is None or name not in paths:
        known = ", ".join(paths)
        found = "several paths" if name is None else f"no path {name!r}"
        raise WrongUsage(f"{found} ({known})", where="--path", remedy=f"Name one of: {known}.")
    budget = budget_of(paths[name], limit_ms, percent(request.percentile), max_requests=request.max_requests)
    B = request.B
    return budget if B is None else budget.at([B] if isinstance(B, int) else list(B))


def _load(request: PlanRequest) -> Load | None:
    arrivals, alike = request.arrivals, request.tokens_per_request is not None
    window_ms = _optional(request.arrivals_window, "--arrivals-window")
    if arrivals is None or isinstance(arrivals, str | Path):
        return None if arrivals is None else read_load(arrivals, window_ms, alike=alike)
    return load_of(table_of(arrivals), TABLE, window_ms, alike=alike)


def _optional(value: Duration | None, option: str) -> float | None:
    return None if value is None else duration(value, option)


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
    return PlainAnswer(found, reporting.plan_tables.show_speculation(found))


def _recorded(fit: FitResult) -> tuple[int | None, tuple[float, float] | None]:
    """Return draft tokens, and their acceptance with its standard error; None if unknown."""
    from latfit.simulation import known_settings  # brings the compiler, which plans of steps do without

    counts = fit.data.more.get("engine_counts") or {}
    facts = engine_facts([("", fit.provenance.get("trace") or {})], counts)
    settings = known_settings(facts).values
    k = settings.get("draft_tokens")
    if not k or "acceptance" not in settings:
        return k, None
    a, accepted = float(settings["acceptance"]), facts.did.get("accepted_tokens", 0.0)
    looked_at = accepted / a if a > 0 else facts.did.get("decode_requests", 1.0)
    return int(k), (a, math.sqrt(max(a * (1 - a), 0.0) / max(looked_at, 1.0)))
