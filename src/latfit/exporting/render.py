"""Templates of exported files, and the quoting of names, numbers and sentences in them.

Other people wrote what a plan holds: a text enters a file only through a filter of this module. A value is quoted
whole, a comment stays on its line.
"""

import functools
import json
import re
import shlex
import textwrap
from typing import TYPE_CHECKING, Any

from latfit._version import __version__
from latfit.exporting.facts import PlanFacts
from latfit.units import format_ms, format_percent, number

if TYPE_CHECKING:
    from jinja2 import Environment

WIDTH = 100  # of a comment's line
MAX_NAME = 50  # a Kubernetes Service has 63 letters at most: `vllm-NAME-prefill`
VALUES_A_LINE = 16  # of a list in protobuf's text format
ASK_MODEL = '"${MODEL:?Set MODEL to the name or the folder of the model.}"'


def render(template: str, plan: PlanFacts, title: str, **values: Any) -> str:
    """Return a file. Its template takes `header` and `values`."""
    header = (
        f"{title}, exported by latfit {__version__} from {plan.name}.",
        f"Plan: {plan.answer}",
        f"Holds for {plan.condition}.",
        f"Rests on {plan.errors}.",
        *plan.remarks,
    )
    return _environment().get_template(template).render(header="\n".join(map(comment, header)), plan=plan, **values)


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("latfit.exporting"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (comment, flag_words, proto, yaml_value, yaml_argument, yaml_flag)
    environment.filters |= {each.__name__: each for each in filters}
    environment.filters |= {"not_set": lambda text: comment(f"Not set: {text}")}
    environment.filters |= {"cron": lambda minute: f"{minute % 60} {minute // 60} * * *"}
    environment.filters |= {"ms": format_ms, "percent": format_percent, "digits": lambda value: number(value, 3)}
    environment.filters |= {"quote": shlex.quote, "repr": repr}
    return environment


def comment(text: str, indent: str = "") -> str:
    """Return lines of a comment; no letter of the text begins a line of its own."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    lines = textwrap.wrap(" ".join(plain.split()), WIDTH - len(indent) - 2, break_on_hyphens=False)
    return "\n".join(f"{indent}# {line}" for line in lines)


def flag_words(name: str, value: Any, negatable: bool = True) -> list[str]:
    """`--max-num-seqs 8`, `--enable-chunked-prefill`, `--no-async-scheduling` if the engine has such options."""
    words = name.replace("_", "-")
    if isinstance(value, bool) and (value or negatable):
        return [f"--{words}" if value else f"--no-{words}"]
    return [f"--{words}", str(value)]


def yaml_flag(name: str, value: Any) -> str:
    """Return a line of vLLM's YAML file; an off switch by its `no-` option, as older versions skip false values."""
    option = name.replace("_", "-")
    return f"no-{option}: true" if value is False else f"{option}: {yaml_value(value)}"


def yaml_value(value: Any) -> str:
    """Return a value of YAML 1.1 and 1.2. Strings are quoted, so that `no` and `1e3` stay strings."""
    return json.dumps(value, ensure_ascii=False)


def yaml_argument(text: str) -> str:
    """Return a word of a container's command line, in which Kubernetes replaces $(NAME)."""
    return yaml_value(text.replace("$", "$$"))


def proto(value: Any) -> str:
    if isinstance(value, str):
        plain = (chr(b) if 32 <= b < 127 and chr(b) not in '\\"' else f"\\{b:03o}" for b in value.encode())
        return '"' + "".join(plain) + '"'
    if not isinstance(value, list):
        return str(value)
    rows = [", ".join(map(str, value[i : i + VALUES_A_LINE])) for i in range(0, len(value), VALUES_A_LINE)]
    return "[\n    " + ",\n    ".join(rows) + "\n  ]"


def folder_name(name: str) -> str:
    """Return the name as a folder, a model of Triton or a Kubernetes object can have it."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME].strip("-") or "model"
