"""Options of a simulated serving engine beyond its limits: step costs, orders, replicas, promises."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.errors import BadInput, WrongUsage
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from latfit.hardware.quote import Quote
    from latfit.model.result import FitResult
    from latfit.sim.engine.cluster import Routing, Transfer
    from latfit.sim.engine.cost import StepCosts
    from latfit.sim.engine.result import Promise
    from latfit.sim.engine.settings import EngineSettings, Order
    from latfit.workload.lengths import LengthLaw


@dataclass(frozen=True)
class CostOptions:
    fit: Annotated[
        Path | None, typer.Option("--fit", help="Step costs of the engine; without it the gpu path of --hardware.")
    ] = None
    prefill_fit: Annotated[
        Path | None, typer.Option("--prefill-fit", help="A fit of its own for steps that hold prefill.")
    ] = None
    prefill_on: Annotated[
        Path | None, typer.Option("--prefill-on", help="Prefill apart, on an engine with the step costs of this fit.")
    ] = None
    transfer: Annotated[
        str | None, typer.Option("--transfer", help="KV transfer between them: fixed and a token, such as 2ms+1us.")
    ] = None
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Prompt and output tokens of requests at a --rate, such as 512:128.")
    ] = None

    def costs(self, hardware: Path, *, scatter: bool) -> "tuple[StepCosts, list[str]]":
        """Step costs, and a note on each that nobody measured: quoted ones, prefill where the fit has seen none.
        scatter: whether steps scatter as the measured ones did."""
        from latfit.model.result import read_fit
        from latfit.sim.engine.cost import step_costs
        from latfit.validation.cautions import prefill_unseen

        if self.transfer is not None and self.prefill_on is None:
            raise WrongUsage("nothing is transferred", where="--transfer", remedy="Add --prefill-on FIT.")
        name, fit, quote = self._of_steps(hardware)
        prefill = None if self.prefill_fit is None else read_fit(self.prefill_fit)
        notes = []
        first = self.prefill_on or self.prefill_fit
        if quote is not None:
            free = (
                "" if quote.per_token_ms or first else "; a prompt costs no more than one token there: name per_token"
            )
            notes.append(f"{name}: times are quoted ({quote.text}), not measured{free}.")
        if unseen := prefill_unseen(fit if first is None else read_fit(first)):
            notes.append(f"{first or name}: {unseen.message}. {unseen.remedy}")
        return step_costs(fit, prefill, scatter=scatter), notes

    def _of_steps(self, hardware: Path) -> "tuple[str, FitResult, Quote | None]":
        """(name, fit, quoted numbers that it stands for) of the engine's steps."""
        from latfit.hardware.profile import read_hardware
        from latfit.model.result import read_fit

        if self.fit is not None:
            return str(self.fit), read_fit(self.fit), None
        path = read_hardware(hardware).first_of(("gpu",))
        if path is None:
            raise BadInput("there is no gpu path", where=str(hardware), remedy="Name the engine's fit with --fit.")
        return path.label, path.fit, path.quote

    def transfer_of(self) -> "Transfer":
        from latfit.sim.engine.cluster import Transfer

        if self.transfer is None:
            return Transfer()
        fixed, _, of_token = self.transfer.partition("+")
        parts = [
            0.0 if part.strip() in ("", "0") else parse_duration_ms(part, option="--transfer")
            for part in (fixed, of_token)
        ]
        return Transfer(*parts)

    def length_law(self) -> "LengthLaw | None":
        from latfit.workload.lengths import Constant

        if self.lengths is None:
            return None
        prompt, _, output = self.lengths.partition(":")
        if not prompt.isdigit() or not output.isdigit() or not int(prompt) or not int(output):
            raise WrongUsage(f"{self.lengths!r} is no pair of lengths", where="--lengths", remedy="Write 512:128.")
        return Constant(int(prompt), int(output))


@dataclass(frozen=True)
class OrderOptions:
    order: Annotated[
        list[str] | None,
        typer.Option("--order", help="Of waiting requests: fcfs, sjf, slo, fair, priority or switch. Repeatable."),
    ] = None
    length_error: Annotated[
        float, typer.Option("--length-error", help="sjf: standard deviation of log(predicted/true output).")
    ] = 0.0
    switch_at: Annotated[int, typer.Option("--switch-at", help="switch: from so many waiting on, sjf by class.")] = 32
    start_at: Annotated[
        int, typer.Option("--start-at", help="continuous, static: so many must wait before they are taken.")
    ] = 1
    decode_first: Annotated[
        bool, typer.Option("--decode-first", help="continuous: prefill only when nothing decodes.")
    ] = False
    swap: Annotated[
        str | None, typer.Option("--swap", help="Swap preempted requests out and in, at this a token, such as 2us.")
    ] = None
    prefix_hit_rate: Annotated[
        float, typer.Option("--prefix-hit-rate", help="Share of every prompt whose cache is there already.")
    ] = 0.0
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="Speculative decoding: tokens of a draft.")] = 0
    acceptance: Annotated[float, typer.Option("--acceptance", help="Chance of a draft token to be accepted.")] = 0.7
    draft_cost: Annotated[
        str | None, typer.Option("--draft-cost", help="What a token of a draft takes, such as 0.5ms.")
    ] = None

    def orders(self, ageing: str | None) -> "list[Order]":
        from latfit.sim.engine.settings import Order

        ageing_ms = math.inf if ageing is None else parse_duration_ms(ageing, option="--ageing")
        return [Order(name, self.length_error, ageing_ms, self.switch_at) for name in self.order or ["fcfs"]]

    def applied(self, settings: "EngineSettings", order: "Order") -> "EngineSettings":
        """The settings with these options."""
        from dataclasses import replace

        from latfit.sim.engine.settings import Speculation

        draft_ms = 0.0 if self.draft_cost is None else parse_duration_ms(self.draft_cost, option="--draft-cost")
        return replace(
            settings,
            order=order,
            start_at=self.start_at,
            prefill_first=not self.decode_first,
            swap_ms_per_token=None if self.swap is None else parse_duration_ms(self.swap, option="--swap"),
            cached_share=self.prefix_hit_rate,
            speculation=Speculation(self.draft_tokens, self.acceptance, draft_ms),
        )


@dataclass(frozen=True)
class ClusterOptions:
    replicas: Annotated[int, typer.Option("--replicas", help="Equal engines behind a router.")] = 1
    route: Annotated[str, typer.Option("--route", help="round-robin, least-loaded or prefix.")] = "round-robin"
    prefix_share: Annotated[
        float, typer.Option("--prefix-share", help="prefix: share of a prompt that a user's last replica holds.")
    ] = 0.5
    tenants: Annotated[int, typer.Option("--tenants", min=1, help="Users that requests at a --rate come from.")] = 1
    ttft_slo: Annotated[str | None, typer.Option("--ttft-slo", help="Time to first token that is promised.")] = None
    tpot_slo: Annotated[str | None, typer.Option("--tpot-slo", help="Time per output token that is promised.")] = None

    def routing(self) -> "Routing":
        from latfit.sim.engine.cluster import Routing

        return Routing(self.replicas, self.route, self.prefix_share)

    def promise(self, sla_ms: float) -> "Promise":
        from latfit.sim.engine.result import Promise

        def span(text: str | None, option: str) -> float:
            return math.inf if text is None else parse_duration_ms(text, option=option)

        return Promise(span(self.ttft_slo, "--ttft-slo"), span(self.tpot_slo, "--tpot-slo"), sla_ms)
