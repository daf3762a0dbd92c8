"""A plan with the name of its file, as exports read it, and the files that they write."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latfit.errors import BadInput, FitNotUsable, SlaOutOfReach, WrongUsage
from latfit.files import check_writable, dumps, make_folder, write_text
from latfit.inputs import decode_json, read_json
from latfit.planning import ApartPlan, FitQuality, Plan, PlannedEngines, ServingPlan
from latfit.units import count_text, format_ms, format_percent, format_rate

MADE_BY = ServingPlan.made_by
DIGEST_LETTERS = 12
RATE_DIGITS = 3  # of the highest rate, as `latfit plan` prints it
MAX_GPU_DIGITS = 4  # a larger number in a trace is no number of GPUs
NOT_EXPORTED = "the replicas of the whole load; the plan's schedule, with fewer at lower load, is not exported."


@dataclass(frozen=True)
class PlanFacts:
    """A plan, and its source. pair: replicas for prefill and decode, instead of the plan's."""

    plan: Plan | ServingPlan
    file: str
    digest: str
    pair: ApartPlan | None = None
    scheduled: bool = False

    @property
    def name(self) -> str:
        return f"{self.file} (sha256 {self.digest})"

    @property
    def requests(self) -> ServingPlan | None:
        return self.plan if isinstance(self.plan, ServingPlan) else None

    @property
    def batches(self) -> Plan | None:
        return self.plan if isinstance(self.plan, Plan) else None

    @property
    def flags(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings by engine, under the engine's names."""
        return self.plan.engines if self.pair is None else {**self.plan.engines, **self.pair.engines}

    @property
    def answer(self) -> str:
        if isinstance(self.plan, Plan):
            return self.plan.answer
        doubt = "Likely: " if self.pair is None and self.plan.promise != "meets" else ""
        outcome = ", ".join(each.outcome for each in (self.pair or self.plan).targets)
        return f"{doubt}{self._deployment(self.plan)} for {self.plan.load} ({self.plan.request}): {outcome}."

    @property
    def condition(self) -> str:
        plan = self.plan
        if isinstance(plan, ServingPlan):
            engines: PlannedEngines = self.pair or plan
            text = f"{', '.join(each.condition for each in engines.targets)} at {plan.load}"
            text += f" over {self._deployment(plan)}"
            if engines.highest_rate_per_s is not None:
                most = engines.highest_rate_per_s
                text += f", and up to {format_rate(most, down=True, digits=RATE_DIGITS, planned_per_s=plan.rate_per_s)}"
            text += f" ({plan.request})"
            if self.pair is None and plan.steps_may_be_slower_pct is not None:
                text += f"; steps may be {format_percent(plan.steps_may_be_slower_pct)} slower"
            return text
        share = "a typical" if plan.percentile is None else f"the p{plan.percentile:g}"
        if plan.rate_per_s is None:
            return f"{share} step within {format_ms(plan.sla_ms)}"
        up_to = "" if plan.capacity is None else f", and up to {plan.capacity.shown}"
        rate, tokens = format_rate(plan.rate_per_s), count_text(plan.tokens_per_request, "token")
        return f"{share} response within {format_ms(plan.sla_ms)} at {rate} a replica{up_to}, requests of {tokens}"

    def _deployment(self, plan: ServingPlan) -> str:
        if self.pair is None:
            return count_text(plan.replicas.value or 0, "replica")
        prefill = count_text(self.pair.prefill_replicas, "replica")
        return f"{prefill} that prefill and {self.pair.replicas:,} that decode"

    @property
    def fits(self) -> Sequence[FitQuality]:
        plan = self.plan
        if isinstance(plan, ServingPlan):
            return plan.fits
        labels = () if plan.chosen is None else plan.chosen.paths
        return [each for each in plan.fits if each.path == plan.engines_path or each.label in labels]

    @property
    def errors(self) -> str:
        fits = "; ".join(f"{each.name}, {each.model}, {each.error}" for each in self.fits)
        return fits or "nominal numbers, nothing measured"

    @property
    def remarks(self) -> list[str]:
        doubts = [] if isinstance(self.plan, ServingPlan) else list(self.plan.why_in_doubt)
        doubts += [each.text for each in self.plan.warnings]
        unused = self.requests is not None and self.requests.schedule is not None and not self.scheduled
        assumed = [*self.plan.notes, *([NOT_EXPORTED] if unused else [])]
        return [f"! {each}" for each in doubts] + [f"Assumed: {each}" for each in assumed]

    @property
    def system(self) -> dict[str, str]:
        """Facts on which all fits that state them agree."""
        stated = {(name, value) for each in self.fits for name, value in each.system.items()}
        names = [name for name, _ in stated]
        return {name: value for name, value in stated if names.count(name) == 1}

    @property
    def path(self) -> str:
        if isinstance(self.plan, Plan):
            return self.plan.engines_path
        return next((path for each in self.fits if (path := each.system.get("path") or each.path)), "gpu")

    @property
    def gpus(self) -> int | None:
        if self.requests is not None and self.requests.tensor_parallel is not None:
            return self.requests.tensor_parallel
        count = self.system.get("tp", "")
        return (int(count) or None) if count.isdecimal() and len(count) <= MAX_GPU_DIGITS else None

    @property
    def kv_tokens(self) -> int | None:
        """Size of a replica's KV cache; None if unlimited."""
        plan = self.requests
        return None if plan is None or plan.kv_cache is None or plan.engine is None else plan.engine.cache_tokens


def read_plan(plan: str | Path | Mapping[str, Any]) -> PlanFacts:
    """Read a plan's file or document. Raises BadInput, SlaOutOfReach, FitNotUsable."""
    if isinstance(plan, str | Path):
        document, file = read_json(Path(plan), what="plan", made_by=MADE_BY), Path(plan).name
    else:
        file = "the plan"
        try:
            document = decode_json(dumps(dict(plan)).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"not a plan ({error})", where=file, remedy=f"Make one with `{MADE_BY}`.") from None
    kind = ServingPlan if isinstance(document, dict) and document.get("kind") == "serving" else Plan
    found: Plan | ServingPlan = kind.from_json(document, file)
    if not found.feasible:
        remedy = "There are no settings to export. Plan with wider limits, a lower rate or more replicas."
        raise SlaOutOfReach(f"the plan cannot be met: {found.binding}", where=file, remedy=remedy)
    if found.unsupported:
        remedy = "Measure such steps, or fit a better model (latfit fit), and plan again."
        raise FitNotUsable(f"the plan is not supported by its data: {found.unsupported[0]}", where=file, remedy=remedy)
    digest = hashlib.sha256(f"{dumps(document)}\n".encode()).hexdigest()[:DIGEST_LETTERS]  # as `--out` writes it
    return PlanFacts(found, file, digest)


@dataclass(frozen=True)
class Wanted:
    model: str | None = None  # name or folder that the engine is to load; None leaves it to whoever starts it
    shapes: Sequence[str] = ()  # inputs of a model with `B` where the batch goes, such as `input:Bx3x224x224`
    begins: str | None = None  # clock time of a plan's recorded day, with its zone; midnight UTC by default


@dataclass(frozen=True)
class Exported:
    """Settings of a plan as files by name; print it for all of them.

    settings: the values by the engine's names.  plan: name and digest of the plan.
    """

    target: str
    plan: str
    files: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def save(self, out: str | Path) -> list[Path]:
        """Write the files into the folder `out`; if it ends like one of them (`.yaml`), that one. Raises WrongUsage."""
        place = Path(out)
        if place.suffix and not place.is_dir():
            texts = [text for name, text in self.files.items() if Path(name).suffix == place.suffix]
            if len(texts) != 1:
                what = "several such files" if texts else "no such file"
                remedy = "Name a folder, which all of them go into; make it first where its name has a dot."
                raise WrongUsage(f"{self.target} has {what}: {', '.join(self.files)}", where="--out", remedy=remedy)
            write_text(place, texts[0])
            return [place]
        targets = {place / name: text for name, text in self.files.items()}
        for target in targets:
            make_folder(target.parent)
            check_writable(target)
        for target, text in targets.items():
            write_text(target, text)
        return list(targets)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if len(self.files) == 1:
            return next(iter(self.files.values())).rstrip("\n")
        return "\n\n".join(f"# --- {name}\n{text.rstrip()}" for name, text in self.files.items())

    def __repr__(self) -> str:
        return f"Exported({self.target}: {', '.join(self.files)})"
