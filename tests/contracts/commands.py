"""What others build on: every command with `--json`, run over the sample traces, and the shape of what it prints.

`python -m tests.contracts.commands FOLDER` writes every output into FOLDER, numbers and all: made before and after the
inside of the package is rebuilt, two such folders must not differ. `python -m tests.contracts.commands --record`
records the shapes and help texts that the tests hold; its diff is then the change of the interface, to be read.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from latfit.cli.app import run

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TINY = "sample_traces/cpu_numpy_tiny.parquet"
OTHER = "sample_traces/cpu_openvino_bf16_smollm2-135m.parquet"
ENGINE = "--batching chunked-prefill --fit cpu_numpy_tiny.fit.json --kv-blocks 4000 --lengths 64:16"

COMMANDS = {
    "ingest": f"ingest {TINY} --out ingested.parquet",
    "trace show": f"trace show {TINY}",
    "fit": f"fit {TINY}",
    "fit saturation": f"fit {TINY} --model saturation --out s.fit.json --hardware other.json",
    "fit context": f"fit {OTHER} --path cpu --force --out auto.fit.json --hardware other.json",
    "fit linear": f"fit {OTHER} --model linear --force --out linear.fit.json --hardware other.json",
    "fit bootstrap": f"fit {TINY} --model linear --bootstrap 20 --set intervals=bootstrap --out b.fit.json "
    "--hardware other.json --force",
    "fit cells": f"fit {TINY} --model linear --cells --out c.fit.json --hardware other.json --force",
    "predict": "predict cpu_numpy_tiny.fit.json -B 1 -B 8 -S 64 -S 100000",
    "predict sensitivity": "predict cpu_numpy_tiny.fit.json -B 1 -B 8 -S 64 --sensitivity",
    "evaluate": f"evaluate cpu_numpy_tiny.fit.json {TINY}",
    "compare": "compare cpu_numpy_tiny.fit.json linear.fit.json",
    "hardware add": "hardware add gpu --nominal launch=12ms,slope=0.05ms",
    "hardware show": "hardware show",
    "plan": "plan --sla 20ms --ttft 100ms --prompt-tokens 64 --out plan.json",
    "export": "export vllm plan.json",
    "plan rate": "plan --sla 20ms --rate 2000/s",
    "plan too much": "plan --sla 20ms --rate 3000/s",
    "plan arrivals": "plan --sla 40ms --arrivals arrivals.csv --arrivals-window 10s",
    "simulate": "simulate policies --policy three-stage --policy gpu-only --rate 3000/s --sla 20ms --requests 4000",
    "simulate sweep": "simulate policies --policy cutoff --rate 1000/s --sweep t-cut=1ms,4ms --requests 2000",
    "simulate engine": f"simulate engine {ENGINE} --rate 20/s --requests 300",
    "simulate engines": f"simulate engine {ENGINE} --batching static --rate 20/s --requests 300 --ttft 1s --replicas 2",
    "validate": "validate cpu_numpy_tiny.fit.json measured.csv --kv-blocks 4000 --force",
    "report": "report --sla 20ms --rate 2000/s --out pages",
    "profile": "profile --device numpy --grid B=1,2;S=1,4 --budget 2s --out profiled.parquet --processes 1",
    "hardware remove": "hardware remove cpu --hardware other.json",
}
"""Name -> arguments, in this order: later ones read what earlier ones write."""

EXIT = {"compare": 8, "plan too much": 5}

FILES = ("cpu_numpy_tiny.fit.json", "auto.fit.json", "hardware.json")
"""Files that they write and that are contracts as well."""

FEW_PLACES: dict[str, Any] = {"RATE_FACTORS": (1.0, 2.0), "LOAD_SLA_FACTORS": (1.0,)}
"""Of the sliders of a report with a load: each place is a plan of seconds."""


def outputs(folder: Path) -> dict[str, Any]:
    """Name -> JSON object, of every command and file; the commands run in `folder`, which is empty."""
    (folder / "sample_traces").symlink_to(ROOT / "sample_traces")
    requests = ["t_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,last_token_s"]
    requests += [f"{0.2 * i:.1f},{40 + i},9,{0.2 * i:.1f},{0.2 * i + 0.02:.2f},{0.2 * i + 0.1:.1f}" for i in range(60)]
    (folder / "measured.csv").write_text("\n".join(requests) + "\n")
    arrivals = ["t_s", *(f"{0.003 * i:.3f}" for i in range(12_000))]
    (folder / "arrivals.csv").write_text("\n".join(arrivals) + "\n")
    before = Path.cwd()
    os.chdir(folder)
    try:
        with patch.multiple("latfit.reporting.page", **FEW_PLACES):
            found = {name: _printed(name, arguments) for name, arguments in COMMANDS.items()}
        found |= {file: json.loads(Path(file).read_text()) for file in FILES}
        found["report page"] = _tables(Path("pages/report.html").read_text())
        return found
    finally:
        os.chdir(before)


def _printed(name: str, arguments: str) -> Any:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([*arguments.split(), "--json"])
    if code != EXIT.get(name, 0):
        raise RuntimeError(f"latfit {arguments}: exit code {code}\n{err.getvalue()}")
    return json.loads(out.getvalue())


def _tables(page: str) -> list[list[str]]:
    """Cells of every table of the page, row by row."""
    rows = re.findall(r"<tr.*?</tr>", page, re.S)
    return [
        [re.sub(r"<.*?>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)] for row in rows
    ]


def shape(value: Any) -> Any:
    """Keys and types: numbers are "number", an empty list is [], others hold the shapes of their items, each once."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        kinds: list[Any] = []
        for inner in map(shape, value):
            if inner not in kinds:
                kinds.append(inner)
        return sorted(kinds, key=json.dumps)
    if isinstance(value, bool):
        return "true or false"
    return "null" if value is None else "number" if isinstance(value, int | float) else "text"


def help_texts() -> dict[str, str]:
    """Command -> its `--help`, as wide as a terminal of 100 columns."""
    import typer

    from latfit.cli.app import app

    def names(group: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        found = [before]
        for name in group.list_commands(typer.Context(group)) if hasattr(group, "list_commands") else ():
            found += names(group.get_command(typer.Context(group), name), (*before, name))
        return found

    texts = {}
    for name in names(typer.main.get_command(app)):
        out = StringIO()
        with redirect_stdout(out):
            run([*name, "--help"])
        texts[" ".join(("latfit", *name))] = out.getvalue()
    return texts


def _written(folder: Path, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in found.items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as scratch:
        made = outputs(Path(scratch))
    if sys.argv[1] == "--record":
        shutil.rmtree(HERE / "shapes", ignore_errors=True)
        _written(HERE / "shapes", {name: shape(value) for name, value in made.items() if name != "report page"})
        (HERE / "help.txt").write_text("".join(f"$ {k} --help\n{v}\n" for k, v in help_texts().items()))
    else:
        _written(Path(sys.argv[1]), made)
