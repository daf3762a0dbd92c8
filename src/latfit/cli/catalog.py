"""`latfit catalog`: step models of systems that others measured, by name."""

from latfit.api.requests import CatalogAddRequest, CatalogRequest
from latfit.cli.options import OutputOptions, group_of_verbs, subverb
from latfit.cli.output import print_answer

catalog = group_of_verbs("Step models of measured systems, by name.")


@subverb(catalog)
def show(request: CatalogRequest, output: OutputOptions) -> None:
    """List the systems of the catalogue, or show one.

    Use a name wherever a fit is accepted.

    Example: latfit plan --fit catalog:rtx4090/llama-3.1-8b --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms
    """
    from latfit.api import catalog as shown

    print_answer(shown.of(request), output)


@subverb(catalog)
def add(request: CatalogAddRequest, output: OutputOptions) -> None:
    """Add a fit to your own entries, in the folder that LATFIT_CATALOG names.

    Example: latfit catalog add trace.fit.json --name h100/llama-3.1-8b
    """
    from latfit.api import add_to_catalog

    print_answer(add_to_catalog.of(request), output)
