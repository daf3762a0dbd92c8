"""What of a fit makes a simulated engine go wrong, told before anybody believes the numbers."""

from collections.abc import Sequence

from latfit.model.result import Caution, FitResult
from latfit.sim.engine.serve import EngineRun
from latfit.sim.engine.settings import EngineSettings

CONTEXT = "context_tokens"
FAR = 1.5
"""Rows with this many times the context that the cache holds pull a fit away from where the engine is."""


def cautions_about(
    fit: FitResult, with_prefill: FitResult | None, run: EngineRun, settings: EngineSettings
) -> Sequence[Caution]:
    """Cautions about the fits (of decoding, and of steps with prefill where it is another) for this run."""
    fits = [fit] if with_prefill is None else [fit, with_prefill]
    found = []
    if not all(CONTEXT in each.structure.columns for each in fits):
        found.append(
            Caution(
                "no_context",
                "the step costs know nothing of cached tokens, which decide much of a step of decoding",
                "Fit --model context or roofline to a trace with a context_tokens column.",
            )
        )
    elif with_prefill is None:
        found.append(
            Caution(
                "one_fit",
                "one fit stands for steps that decode and steps that prefill, where a cached token costs differently",
                "Fit them apart (--where 'prefill_tokens == 0' and '> 0'), and give the second as --prefill-fit.",
            )
        )
    if unseen := prefill_unseen(fits[-1]):
        found.append(unseen)
    found += [_far(each, settings) for each in fits if _highest(each, CONTEXT) > FAR * settings.cache_tokens][:1]
    largest = int(run.batch_sizes.nonzero()[0].max())
    measured = max(_highest(each, "B") for each in fits)
    if 0 < measured < largest:
        found.append(
            Caution(
                "outside_domain",
                f"steps hold up to {largest:,} requests, and the fit has seen {measured:,.0f} at most",
                "Measure larger batches, or lower --max-num-seqs to what the engine had.",
            )
        )
    return found


def prefill_unseen(fit: FitResult) -> Caution | None:
    """For the fit that steps with prefill are taken from."""
    if fit.knows_prefill:
        return None
    return Caution(
        "no_prefill",
        "the fit of steps with prefill has seen none, so that times to the first token are a lower bound",
        "Fit steps with prefill too, or give a fit of them as --prefill-fit.",
    )


def _highest(fit: FitResult, column: str) -> float:
    """The end of what was measured; 0 where that is not known."""
    return float(fit.domain[column][1]) if column in fit.domain else 0.0


def _far(fit: FitResult, settings: EngineSettings) -> Caution:
    return Caution(
        "far_rows",
        f"the fit has rows of up to {_highest(fit, CONTEXT):,.0f} cached tokens, and the cache holds"
        f" {settings.cache_tokens:,}: rows where the engine never is pull the fit",
        f"Fit with --where 'context_tokens <= {settings.cache_tokens}'.",
    )
