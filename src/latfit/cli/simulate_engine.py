"""`latfit simulate --engine ...`: what a serving engine makes of a load, token by token.

Its limits are options by the names that serving engines use; the others are step costs, orders, replicas, promises.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.errors import BadInput, SlaOutOfReach, WrongUsage
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from latfit.cli.simulate import LoadOptions, RunOptions, SweepOptions
    from latfit.hardware import Nominal
    from latfit.model import FitResult
    from latfit.simulation import (
        Cluster,
        EngineResult,
        EngineSettings,
        Order,
        Promise,
        Routing,
        StepCosts,
        Transfer,
    )
    from latfit.workload import LengthDistribution, OpenLoad, RecordedLoad


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
        from latfit.model import read_fit
        from latfit.simulation import step_costs
        from latfit.validation import prefill_unseen

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

    def _of_steps(self, hardware: Path) -> "tuple[str, FitResult, Nominal | None]":
        """(name, fit, quoted numbers that it stands for) of the engine's steps."""
        from latfit.hardware import read_hardware
        from latfit.model import read_fit

        if self.fit is not None:
            return str(self.fit), read_fit(self.fit), None
        path = read_hardware(hardware).first_of(("gpu",))
        if path is None:
            raise BadInput("there is no gpu path", where=str(hardware), remedy="Name the engine's fit with --fit.")
        return path.label, path.fit, path.nominal

    def transfer_of(self) -> "Transfer":
        from latfit.simulation import Transfer

        if self.transfer is None:
            return Transfer()
        fixed, _, of_token = self.transfer.partition("+")
        parts = [
            0.0 if part.strip() in ("", "0") else parse_duration_ms(part, option="--transfer")
            for part in (fixed, of_token)
        ]
        return Transfer(*parts)

    def length_law(self) -> "LengthDistribution | None":
        from latfit.workload import Constant

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
        from latfit.simulation import Order

        ageing_ms = math.inf if ageing is None else parse_duration_ms(ageing, option="--ageing")
        return [Order(name, self.length_error, ageing_ms, self.switch_at) for name in self.order or ["fcfs"]]

    def applied(self, settings: "EngineSettings", order: "Order") -> "EngineSettings":
        """The settings with these options."""
        from dataclasses import replace

        from latfit.simulation import Speculation

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
        from latfit.simulation import Routing

        return Routing(self.replicas, self.route, self.prefix_share)

    def promise(self, sla_ms: float) -> "Promise":
        from latfit.simulation import Promise

        def span(text: str | None, option: str) -> float:
            return math.inf if text is None else parse_duration_ms(text, option=option)

        return Promise(span(self.ttft_slo, "--ttft-slo"), span(self.tpot_slo, "--tpot-slo"), sla_ms)


@dataclass(frozen=True)
class EngineOptions:
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="chunked-prefill (as vLLM does), continuous, selective or static. Repeatable."),
    ] = None
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Requests in a step, at most.")] = 256
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens in a step, at most.")
    ] = 2048
    kv_blocks: Annotated[
        int | None,
        typer.Option("--kv-blocks", help="Blocks of the KV cache, as the engine resolves them at its start."),
    ] = None
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens in a block.")] = 16
    long_prefill_token_threshold: Annotated[
        int, typer.Option("--long-prefill-token-threshold", help="Prompt tokens of one request in a step; 0: no limit.")
    ] = 0
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Plan a step after the one before it, not while it runs.")
    ] = False

    def settings(self) -> "list[EngineSettings]":
        """Of each engine asked for. Raises WrongUsage for what none can be set to, or without the size of the cache."""
        from latfit.errors import WrongUsage
        from latfit.simulation import EngineSettings

        if self.kv_blocks is None:
            raise WrongUsage(
                "the size of the KV cache decides most, and is not given",
                where="--kv-blocks",
                remedy="Look for `GPU KV cache size: ... tokens` in the engine's log and divide by the block size.",
            )
        return [
            EngineSettings(
                batching=name,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                kv_blocks=self.kv_blocks,
                block_size=self.block_size,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                asynchronous=not self.synchronous,
            )
            for name in self.engine or ["chunked-prefill"]
        ]


@dataclass(frozen=True)
class Asked:
    """The options of `simulate` that a serving engine reads."""

    engine: EngineOptions
    cost: CostOptions
    order: OrderOptions
    cluster: ClusterOptions
    load: "LoadOptions"
    run: "RunOptions"
    hardware: Path
    service: str
    ageing: str | None
    sweep: "SweepOptions"


def simulate_engine(asked: Asked, *, seed: int, json: bool, quiet: bool) -> None:
    """Run every engine and order at every rate; print, draw, and say where nothing carries the load."""
    from latfit.cli.output import note, print_json, print_table, print_warnings, progress_bar
    from latfit.files import write_bytes
    from latfit.simulation import simulate_engine as run_engine

    figure, folder = asked.sweep.figure, asked.sweep.report
    asked.sweep.check_targets()
    costs, unmeasured = asked.cost.costs(asked.hardware, scatter=_scatters(asked.service))
    options = asked.run.options(seed)
    promise, cluster = asked.cluster.promise(options.sla_ms), _cluster(asked)
    cases = _cases(asked)
    runs: list[EngineResult] = []
    with progress_bar("Simulating", quiet=quiet or json) as advance:
        for load, settings in cases:
            found = run_engine(load, costs, settings, options, promise, cluster)
            runs.append(replace(found, notes=[*unmeasured, *found.notes]))
            advance(len(runs), len(cases))
    if figure is not None:
        from latfit.report import engine_figure, style

        write_bytes(figure, style.png(engine_figure(runs)))
    if json:
        print_json({"runs": [run.to_json() for run in runs]})
    else:
        from latfit.report import engine_tables

        for table in engine_tables(runs):
            print_table(table)
            typer.echo("")
        print_warnings(dict.fromkeys(text for run in runs for text in run.notes))
    if figure is not None:
        note(f"Wrote {figure}", quiet=quiet or json)
    if folder is not None:
        from latfit.provenance import command_line, utc_now
        from latfit.report import Making, engines_page, write_page

        made = Making(command_line(), utc_now(), options.sla_ms)
        note(f"Wrote {write_page(folder, engines_page(runs, made)).html}", quiet=quiet or json)
    if asked.load.arrivals is None and not any(run.summary.stable for run in runs):
        raise SlaOutOfReach(
            "no engine carries this load: requests wait longer and longer",
            where="--rate",
            remedy="Lower the rate, or give more --replicas, --kv-blocks or --max-num-seqs.",
        )


def _scatters(service: str) -> bool:
    """Whether steps scatter as measured. Raises WrongUsage for a law that steps of an engine have not."""
    if service not in ("fitted", "deterministic"):
        raise WrongUsage(
            f"steps of an engine are not {service}", where="--service", remedy="Take fitted or deterministic."
        )
    return service == "fitted"


def _cases(asked: Asked) -> "list[tuple[OpenLoad | RecordedLoad, EngineSettings]]":
    """Every load with every engine and order."""
    from latfit.workload import ClosedLoad, OpenLoad

    load = asked.load.load()
    if isinstance(load, ClosedLoad):
        raise WrongUsage("engines take no closed loop", where="--users", remedy="Give --rate or --arrivals.")
    if isinstance(load, OpenLoad):
        law = asked.cost.length_law()
        if law is not None and asked.load.prompt_lengths is not None:
            raise WrongUsage("lengths are given twice", where="--lengths, --prompt-lengths", remedy="Give one of them.")
        if law is None and asked.load.prompt_lengths is None:
            raise WrongUsage(
                "requests have no lengths", where="--rate", remedy="Give --lengths 512:128 or --prompt-lengths FILE."
            )
        load = replace(load, users=asked.cluster.tenants, lengths=law or load.lengths)
    loads: list[OpenLoad | RecordedLoad] = [load.at_rate(rate) for rate in asked.load.rates()] or [load]
    engines = [
        asked.order.applied(settings, order)
        for settings in asked.engine.settings()
        for order in asked.order.orders(asked.ageing)
    ]
    return [(each, settings) for each in loads for settings in engines]


def _cluster(asked: Asked) -> "Cluster":
    """The engines that serve together."""
    from latfit.model import read_fit
    from latfit.simulation import Cluster, step_costs

    if asked.cost.prefill_on is None:
        return Cluster(asked.cluster.routing())
    prefill = step_costs(read_fit(asked.cost.prefill_on), scatter=_scatters(asked.service))
    return Cluster(asked.cluster.routing(), prefill, asked.cost.transfer_of())
