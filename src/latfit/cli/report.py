"""`latfit report`: one page and its pictures from a hardware profile."""

from pathlib import Path

from latfit.api.requests import ReportRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_answer, progress_bar
from latfit.errors import WrongUsage


@verb
def report(request: ReportRequest, output: OutputOptions) -> None:
    """Write one self-contained HTML page, answer first, and its figures as PNG.

    Example: latfit report --sla 50ms
    """
    out = Path(request.out)
    if out.suffix.lower() in (".html", ".htm") and not out.is_dir():
        raise WrongUsage(
            f"{out.name} would be a folder, with the page report.html in it",
            where="--out",
            remedy="Name a folder: --out reports.",
        )
    from latfit.api import report as write

    with progress_bar("Writing the report", quiet=output.silent):
        written = write.of(request)
    print_answer(written, output)
