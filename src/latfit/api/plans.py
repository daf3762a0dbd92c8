"""Decisions for an SLA: which steps meet it, how to run a load within it, which settings and capacity follow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from latfit.api.hardware import check_one_model, profile_of, refuse_unread_context
from latfit.api.quantities import (
    Duration,
    Needs,
    duration,
    library_verb,
    only_with,
    percent,
    rate as per_ms,
    transfer as transfers,
)
from latfit.errors import WrongUsage
from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.planning import (
    Capacity,
    Load,
    Objective,
    Plan as PlanRecord,
    PlanRequest,
    ServingTargets,
    StepBudget,
    load_of,
    make_plan,
    parse_objective,
    read_load,
    step_budget as budget_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from latfit.reporting import PlanSummary
    from latfit.warning import LatfitWarning

WARNINGS = 3


@dataclass(frozen=True, repr=False)
class Plan:
    """What to do under an SLA. Print it for the answer; DataFrames hold the rest, times in ms, rates per second.

    result: the record (`latfit.planning.Plan`).  hardware, request: what it was made for.
    """

    result: PlanRecord
    hardware: HardwareProfile = field(default_factory=HardwareProfile)
    request: PlanRequest = field(default_factory=PlanRequest)

    @property
    def feasible(self) -> bool:
        """Whether the SLA can be met."""
        return self.result.feasible

    @property
    def promise(self) -> str:
        """yes, no or in doubt: whether the data support the answer."""
        return self.result.promise

    @property
    def answer(self) -> str:
        """The plan in a sentence."""
        return self.result.answer

    @property
    def B1(self) -> int | None:
        """Batch from which the GPU is at least as fast as the CPU, its wait at the rate included; None where there is
        none."""
        return self.result.B1.value

    @property
    def B2(self) -> int | None:
        """Batch that reaches half of the path's best throughput; None where there is none."""
        return self.result.steps.B2.value

    @property
    def T_cut_ms(self) -> float | None:
        """How long a request may wait for the GPU before it goes to the CPU; None where no such limit is needed."""
        return self.result.T_cut.value

    @property
    def capacity_per_s(self) -> float | None:
        """Highest rate within the SLA on one replica, in requests/s; None without a rate."""
        found = self.result.capacity
        return found.sustainable_per_s if isinstance(found, Capacity) else None

    @property
    def replicas(self) -> int | None:
        """Replicas that the whole rate needs; None without a rate, or where no number serves it."""
        found = self.result.capacity
        return found.replicas if isinstance(found, Capacity) else None

    @property
    def warnings(self) -> "list[LatfitWarning]":
        return list(self.result.warnings)

    @property
    def why_in_doubt(self) -> list[str]:
        """Why the answer is not promised, in sentences; empty where it is."""
        return list(self.result.why_in_doubt)

    @cached_property
    def settings(self) -> "DataFrame":
        """Settings of serving engines under their own names: engine, setting, value."""
        rows = [(engine, name, value) for engine, flags in self.result.engines.items() for name, value in flags.items()]
        return _frame(dict(zip(("engine", "setting", "value"), row, strict=True)) for row in rows)

    @cached_property
    def limits(self) -> "DataFrame":
        """Tokens that a step of B requests may hold within the SLA: path, B, S_min, S_max (missing: any number),
        S_promised, extrapolated."""
        return _frame(vars(row) for row in self.result.steps.S_at_B)

    @cached_property
    def limits_by_tokens(self) -> "DataFrame":
        """Requests that a step of S tokens may hold within the SLA: path, S, B_min, B_max, extrapolated."""
        return _frame(vars(row) for row in self.result.steps.B_at_S)

    @cached_property
    def strategies(self) -> "DataFrame":
        """Every way to run the load, a row each: latency, headroom, capacity, and why it was selected or not."""
        asked = "typical" if self.result.percentile is None else f"p{self.result.percentile:g}"
        return _frame(
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
            for row in self.result.alternatives
        )

    @cached_property
    def _told(self) -> "PlanSummary":
        from latfit.reporting import plan_summary

        return plan_summary(self.result)

    @property
    def verdict(self) -> str:
        return self._told.verdict

    @property
    def state(self) -> str:
        """good (met), doubt (met, but the data do not prove it) or bad (not met)."""
        return self._told.state

    def summary(self) -> str:
        """The answer as `latfit plan` prints it."""
        told = self._told
        return "\n".join([told.verdict, *told.lines, *(f"  ! {text}" for text in told.warnings[:WARNINGS])])

    def plot(self) -> "Figure":
        """The percentile over the rate for every strategy; without a rate the latency of batches, with B1 and B2."""
        from latfit.reporting import plan_figure

        return plan_figure(self.result, self.hardware, self.request)

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit plan --json`."""
        return self.result.to_json()

    def save(self, target: str | Path) -> None:
        """Write it as JSON, whole or not at all. Raises TargetNotWritable."""
        from latfit.files import write_json

        write_json(Path(target), self.to_json())

    def __repr__(self) -> str:
        return f"Plan({self.answer})"

    def _repr_html_(self) -> str:
        told = self._told
        lines = [f"<b>{escape(told.verdict)}</b>", *map(escape, (*told.lines, *told.warnings[:WARNINGS]))]
        return f"<p>{'<br>'.join(lines)}</p>"


def _loaded(o: Any) -> bool:
    return o.rate is not None or o.rate_per_s is not None or o.arrivals is not None


NO_LOAD = "a plan without a load is for single steps"
GIVE_LOAD = "Add --rate 500/s"
LOADS = ("replicas", "objective", "laws_only", "seed", "max_batch")
OF_PLANS = (
    *(Needs(name, _loaded, NO_LOAD, GIVE_LOAD) for name in LOADS),
    Needs("seed", lambda o: not o.laws_only, "--laws-only draws nothing"),
    Needs("arrivals_window", lambda o: o.arrivals is not None, "no arrivals are recorded", "Add --arrivals FILE"),
    Needs("prompt_tokens", lambda o: o.ttft is not None, "there is no target for a first token", "Add --ttft 200ms"),
)
"""What parameters of `plan` need."""

AXES = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
"""Settings that stay where they are given."""


def _of_memory(name: str) -> Needs:
    return Needs(
        name,
        lambda o: o.model_config is not None and o.kv_blocks is None,
        "the KV cache is not computed from memory",
        "Add --model-config config.json",
    )


OF_ENGINE_PLANS = (
    Needs(
        "goodput",
        lambda o: o.ttft or o.tpot or o.e2e or o.sla or o.classes or o.arrivals is not None,
        "nothing is promised",
        "Add --ttft 500ms",
    ),
    Needs("lengths", lambda o: o.arrivals is None, "recorded requests have their own"),
    Needs("arrival_process", lambda o: o.arrivals is None, "the arrivals are recorded"),
    Needs("arrival_process", lambda o: o.users is None, "users send when they have an answer"),
    Needs("think", lambda o: o.users is not None, "there are no users", "Add --users 20"),
    Needs("classes", lambda o: o.arrivals is None, "recorded requests have their own"),
    Needs("start_up", lambda o: o.arrivals is not None, "no arrivals are recorded", "Add --arrivals FILE"),
    Needs("arrivals_window", lambda o: o.start_up is not None, "no schedule is planned", "Add --start-up 2min"),
    Needs("hardware", lambda o: o.fit is None, "--fit names the step costs"),
    Needs("route", lambda o: o.replicas != 1, "there is one engine"),
    Needs("transfer", lambda o: o.replicas is None, "--replicas says how many engines do both"),
    Needs("transfer", lambda o: o.users is None, "prefill apart takes no users who wait for answers"),
    Needs("model_config", lambda o: o.kv_blocks is None, "--kv-blocks gives the size of the cache"),
    *(
        _of_memory(name)
        for name in ("gpu_memory", "gpu_memory_utilization", "kv_memory", "kv_dtype", "tensor_parallel")
    ),
)
"""What parameters of `plan_engine` need."""


OF_BATCHES = (
    "percentile", "objective", "context", "max_batch", "wait", "launch_share",
    "prompt_tokens", "laws_only", "tokens_per_request",
)  # fmt: skip
"""What belongs to plans of steps and batches."""

OF_ENGINES = (
    "e2e", "goodput", "lengths", "growth", "start_up", "users", "think", "arrival_process", "classes", "fit",
    "prefill_fit", "kv_blocks", "model_config", "gpu_memory", "gpu_memory_utilization", "kv_memory", "kv_dtype",
    "tensor_parallel", *AXES, "block_size", "synchronous", "prefix_hit_rate", "batching", "order", "route",
    "price_per_hour", "watts", "steps_slower",
)  # fmt: skip
"""What belongs to plans of serving engines."""


def plans_engines(o: Any) -> bool:
    """Whether options describe serving engines: requests have lengths, or limits that only requests have."""
    if any(each is not None for each in (o.lengths, o.e2e, o.goodput, o.users)):
        return True
    return o.sla is None and (o.ttft is not None or o.tpot is not None)


def _of_kind(engines: bool, each: Needs) -> Needs:
    """A need that counts for one kind of plan."""
    return Needs(each.name, lambda o: plans_engines(o) != engines or each.holds(o), each.why, each.remedy)


PLANS = SimpleNamespace(
    needs=(
        *(Needs(name, lambda o: not plans_engines(o), "serving engines are planned") for name in OF_BATCHES),
        *(
            Needs(name, plans_engines, "steps or batches are planned", "Add --lengths 2000:300 --ttft 500ms")
            for name in OF_ENGINES
        ),
        *(_of_kind(False, each) for each in OF_PLANS),
        *(_of_kind(True, each) for each in OF_ENGINE_PLANS),
    )
)
"""What the options of `latfit plan` need, which plans both."""


@library_verb
@only_with(*OF_PLANS)
def plan(
    paths: Any,
    sla: Duration | None = None,
    rate: str | None = None,
    *,
    sla_ms: float | None = None,
    rate_per_s: float | None = None,
    percentile: float | str = 99.0,
    arrivals: Any = None,
    arrivals_window: Duration | None = None,
    replicas: int = 1,
    tokens_per_request: int | None = None,
    context: float | None = None,
    max_batch: int | None = None,
    transfer: str | None = None,
    wait: Duration | None = None,
    launch_share: float = 0.5,
    ttft: Duration | None = None,
    tpot: Duration | None = None,
    prompt_tokens: int = 512,
    objective: str | Mapping[str, float] | None = None,
    laws_only: bool = False,
    seed: int = 0,
    force: bool = False,
) -> Plan:
    """Decide for a latency SLA: per step, or per response (waiting included) where a rate is given.

    paths: as for `Hardware`: {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}, a `hardware.json`, a fit.  sla: "20ms"
    (or sla_ms=20), kept by `percentile` percent.  rate: "500/s" (or rate_per_s=500) for all `replicas` together, or
    `arrivals`: a file or table of moments (t_s) or of a rate over time (t_s, rate_per_s), cut into windows of
    `arrivals_window`.  tokens_per_request: tokens that a request adds to a step, by default 1, as in decode; recorded
    lengths are refused without it.  context: cached tokens of a request.  max_batch: of the GPU.  transfer ("0.2ms",
    "2ms+1us" with a part per token), wait: before the GPU begins.  launch_share: share of the launch cost in a step
    from which B2 counts.  ttft, tpot, prompt_tokens: targets
    for the engine settings.  objective: weights, {"p99": 1, "mean": 0.5}.  laws_only: closed forms, no
    simulation.  seed: of the simulation that verifies the decision.  force: plan with paths
    that are of different models.

    A plan that nothing can meet comes back with feasible=False and what would make it feasible. Raises BadInput,
    FitNotUsable, WrongUsage.
    """
    limit_ms = duration(sla, "--sla", sla_ms)
    offered = None if rate is None and rate_per_s is None else per_ms(rate, "--rate", rate_per_s)
    tokens = 1 if tokens_per_request is None else tokens_per_request
    fixed_ms, ms_per_token = (0.0, 0.0) if transfer is None else transfers(transfer)
    request = PlanRequest(
        rate=offered,
        load=_load(arrivals, arrivals_window, alone=offered is None, alike=tokens_per_request is not None),
        replicas=replicas,
        context=context,
        max_batch=max_batch,
        transfer_ms=fixed_ms + ms_per_token * tokens,
        wait_ms=None if wait is None else duration(wait, "--wait", zero=True),
        launch_share=launch_share,
        serving=ServingTargets(_optional(ttft, "--ttft"), _optional(tpot, "--tpot"), prompt_tokens),
        objective=_objective(objective),
        laws_only=laws_only,
        seed=seed,
    )
    profile = profile_of(paths)
    refuse_unread_context(profile, context)
    if not force:
        check_one_model(profile)
    found = make_plan(profile, limit_ms, percentile=percent(percentile), tokens_per_request=tokens, request=request)
    return Plan(found, profile, request)


@library_verb
def step_budget(
    paths: Any,
    sla: Duration | None = None,
    *,
    sla_ms: float | None = None,
    B: int | Iterable[int] | None = None,
    percentile: float | str = 99.0,
    path: str | None = None,
    max_requests: int | None = None,
) -> StepBudget:
    """What fits into a step within an SLA: tokens by number of requests, to cut a candidate batch in microseconds.

    paths: what `Hardware` takes; path: which of its paths, where it has several.  sla: "10ms" (or sla_ms=10), kept by
    `percentile` percent of steps.  B: the numbers of requests to tabulate, by default 1, 2, 4, ... up to
    `max_requests`, which is the largest measured where nothing else is said.

    `.table` is a DataFrame (B, S_max), `.trim(least, wanted)` cuts a batch. Raises SlaOutOfReach, WrongUsage.
    """
    limit_ms = duration(sla, "--sla", sla_ms)
    machine = _one_path(profile_of(paths), path)
    found = budget_of(machine, limit_ms, percent(percentile), max_requests=max_requests)
    return found if B is None else found.at([B] if isinstance(B, int) else list(B))


def _one_path(profile: HardwareProfile, name: str | None) -> ExecutionPath:
    known = ", ".join(profile.paths)
    if name is None and len(profile.paths) == 1:
        return next(iter(profile.paths.values()))
    if name is None or name not in profile.paths:
        found = "several paths" if name is None else f"no path {name!r}"
        raise WrongUsage(f"{found} ({known})", where="--path", remedy=f"Name one of: {known}.")
    return profile.paths[name]


def _load(arrivals: Any, window: Duration | None, *, alone: bool, alike: bool) -> Load | None:
    """The load that `arrivals` describes; None without. alike: as in `read_load`."""
    if arrivals is None:
        return None
    if not alone:
        raise WrongUsage(
            "a rate and recorded arrivals contradict each other",
            where="--rate, --arrivals",
            remedy="Give one of them.",
        )
    window_ms = _optional(window, "--arrivals-window")
    if isinstance(arrivals, str | Path):
        return read_load(arrivals, window_ms, alike=alike)
    from latfit.api.reading import TABLE, table_of

    return load_of(table_of(arrivals), TABLE, window_ms, alike=alike)


def _objective(objective: str | Mapping[str, float] | None) -> Objective | None:
    if objective is None:
        return None
    if isinstance(objective, str):
        return parse_objective(objective)
    return parse_objective(",".join(f"{name}={weight}" for name, weight in objective.items()))


def _optional(value: Duration | None, option: str) -> float | None:
    return None if value is None else duration(value, option)


def _frame(rows: Iterable[Mapping[str, Any]]) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame([dict(row) for row in rows])
