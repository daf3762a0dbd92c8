"""`latfit speculate`: from which batch speculative decoding stops paying."""

from latfit.api.requests import SpeculateRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_answer


@verb
def speculate(request: SpeculateRequest, output: OutputOptions) -> None:
    """Say from which batch speculative decoding stops paying.

    Compares decode steps of B tokens with steps of B (1 + K) tokens, by a fit of the engine's steps; --drafts names a
    fit of the engine while it drafts: step times include drafting, and the acceptance is read from its trace.

    \b
    latfit speculate trace.fit.json --draft-tokens 3 --acceptance 0.7 --draft-cost 0.5ms
    latfit speculate plain.fit.json --drafts drafting.fit.json
    """
    from latfit.api import speculate as answered

    print_answer(answered.of(request), output)
