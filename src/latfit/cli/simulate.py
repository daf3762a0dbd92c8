"""`latfit simulate`: batching policies, a serving engine token by token, or the literature's claims."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from latfit.api.requests import SimulateEngineRequest, SimulateRequest, StudyRequest, SweepOptions
from latfit.cli.options import FileOptions, OutputOptions, group_of_verbs, subverb
from latfit.cli.output import note, print_answer, progress_bar
from latfit.errors import Interrupted, SlaOutOfReach
from latfit.units import format_rate

if TYPE_CHECKING:
    from latfit.api import Simulation

Asked = TypeVar("Asked", bound=SweepOptions)
Found = TypeVar("Found", bound="Simulation")

simulate = group_of_verbs(
    """Simulate batching policies or a serving engine under a load.

    \b
    latfit simulate policies --policy three-stage --policy gpu-only --rate 500/s
    latfit simulate engine --fit gpu.fit.json --kv-blocks 2588 --rate 2/s \\
        --lengths 512:128
    latfit simulate study --nominal gpu:launch=8ms,slope=0.05ms \\
        --nominal amx:p50=2ms
    """
)


@subverb(simulate)
def policies(request: SimulateRequest, files: FileOptions, output: OutputOptions) -> None:
    """Simulate batching policies on one or two execution paths.

    All policies meet the same random arrivals and noise (common random numbers).

    \b
    latfit simulate policies --policy three-stage --policy gpu-only --rate 500/s
    """
    from latfit.api import simulate

    if request.tokens_per_request is None and not (request.by_prompt or request.prompt_lengths or request.nominal):
        text = "Each request adds one token to a batch (decode); --tokens-per-request changes that."
        note(text, quiet=output.silent)
    found = _simulated(simulate.of, request, files, output)
    for text in found.skipped:
        note(f"Skipped a point of the optimal policy: {text}", quiet=output.silent)
    if request.log is not None:
        note(f"Wrote {request.log}", quiet=output.silent)
    if not found.stable:
        best = max(found.runs, key=lambda run: run.capacity_per_s or 0.0)
        carried = "response times grow without end"
        if best.capacity_per_s:
            carried = f"{best.policy} carries {format_rate(best.capacity_per_s, down=True)}"
        raise SlaOutOfReach(
            f"no policy carries {format_rate(best.rate_per_s or 0.0)}: {carried}",
            where="--rate",
            remedy="Lower the rate, add servers, or take a policy that uses both paths.",
        )


@subverb(simulate)
def engine(request: SimulateEngineRequest, files: FileOptions, output: OutputOptions) -> None:
    """Simulate a serving engine token by token.

    Batching, KV cache, preemption and replicas are simulated with step times from a fit. First check the settings
    with `latfit validate` on a measured run.

    \b
    latfit simulate engine --fit gpu.fit.json --kv-blocks 2588 --rate 2/s \\
        --lengths 512:128
    """
    from latfit.api import simulate_engine

    found = _simulated(simulate_engine.of, request, files, output)
    if not found.stable:
        best = max(found.runs, key=lambda run: run.summary.throughput_per_s)
        served = format_rate(best.summary.throughput_per_s)
        raise SlaOutOfReach(
            f"no engine carries {format_rate(best.rate_per_s)}: {best.engine} serves {served}",
            where="--rate" if request.arrivals is None else "--arrivals",
            remedy=found.would_carry,
        )


@subverb(simulate)
def study(request: StudyRequest, files: FileOptions, output: OutputOptions) -> None:
    """Test claims of the literature on batching on this hardware.

    Runs every policy at ten loads up to the capacity of the main path.

    \b
    latfit simulate study --nominal gpu:launch=8ms,slope=0.05ms --nominal amx:p50=2ms
    """
    from latfit.api import simulate_study

    _simulated(simulate_study.of, request, files, output)


def _simulated(
    call: "Callable[..., Found]", request: SweepOptions, files: FileOptions, output: OutputOptions
) -> "Found":
    """The simulation with a bar on the way, then its answer, picture and page."""
    files.check()
    try:
        with progress_bar("Simulating", quiet=output.silent) as advance:
            found = call(replace(request, progress=advance))
    except KeyboardInterrupt:
        if request.out is None:
            raise
        kept = f"--resume --out {request.out} goes on from there."
        raise Interrupted("interrupted; the runs so far are kept", where=str(request.out), remedy=kept) from None
    print_answer(found, output)
    files.write(found, quiet=output.silent)
    if request.out is not None:
        note(f"Wrote {request.out}", quiet=output.silent)
    return found
