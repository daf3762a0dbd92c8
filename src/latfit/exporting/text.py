"""Names, numbers and sentences as the files of other programs take them.

What a plan holds came from files and names that other people wrote, so nothing is put into a shell script, a YAML
document or a protobuf text but through here: a text is quoted whole, a comment stays on its line.
"""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from latfit.errors import WrongUsage

WIDTH = 100
ASCII = 127


def shell(text: str) -> str:
    """One word of a POSIX shell."""
    return shlex.quote(text)


def model_word(model: str | None) -> str:
    """A model as a word of a script, which asks for it where nobody named it."""
    return '"${MODEL:?Set MODEL to the name or the folder of the model.}"' if model is None else shell(model)


def yaml_text(text: str) -> str:
    """A string of YAML 1.1 and 1.2, double-quoted: words such as `no` or `1e3` stay strings, and what is not printable
    is escaped by its code point, which JSON would split into two halves beyond the first 65,536."""
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    code = ord(letter)
    if letter in '\\"':
        return "\\" + letter
    if letter.isprintable():
        return letter
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def proto_text(text: str) -> str:
    """A string of protobuf's text format: UTF-8, in octal what is not a plain letter."""
    plain = (chr(b) if 32 <= b < ASCII and chr(b) not in '\\"' else f"\\{b:03o}" for b in text.encode())
    return '"' + "".join(plain) + '"'


def yaml_value(value: Any) -> str:
    """A boolean, a number or a text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else yaml_text(str(value))


def comment(text: str, indent: str = "") -> list[str]:
    """Lines of a comment that begins with `#`; a break in the text, of any kind, starts no line of its own."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    lines = textwrap.wrap(" ".join(plain.split()), WIDTH - len(indent) - 2, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def vllm_flags(settings: Mapping[str, Any]) -> list[str]:
    """Words of vLLM's command line."""
    return [word for name, value in settings.items() for word in flag(name, value)]


def flag(name: str, value: Any) -> list[str]:
    """`--max-num-seqs 8`, `--enable-chunked-prefill`, `--no-async-scheduling`."""
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{words}" if value else f"--no-{words}"]
    return [f"--{words}", str(value)]


def yaml_flag(name: str, value: Any) -> str:
    """A line of vLLM's YAML file, whose keys are options: what is switched off goes by its option too, since older
    versions leave out what is false."""
    option = name.replace("_", "-")
    return f"no-{option}: true" if value is False else f"{option}: {yaml_value(value)}"


def script(head: Sequence[str], program: Sequence[str], words: Iterator[Sequence[str]]) -> str:
    """A shell script that runs a program with one option a line, comments between them; what is given to the script
    follows the options, and so wins over them."""
    return "\n".join(
        ["#!/usr/bin/env bash", *head, "set -eu", "options=(", *(line for lines in words for line in lines), ")",
         f'exec {" ".join(program)} "${{options[@]}}" "$@"', ""]
    )  # fmt: skip


def checked_name(name: str, option: str) -> str:
    """A name that a program can be given as a word. Raises WrongUsage."""
    reason = ""
    if not name or name != name.strip():
        reason = "is empty, or begins or ends with a space"
    elif name.startswith("-"):
        reason = "would be read as an option"
    elif not name.isprintable():
        reason = "has letters that cannot be printed"
    if reason:
        raise WrongUsage(f"{name!r} {reason}", where=option, remedy="Give the name or the folder of a model.")
    return name


def folder_name(name: str, most: int = 60) -> str:
    """Letters, digits and marks that a folder, a model of Triton and a Kubernetes object can be called by."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    return "-".join(filter(None, plain.split("-")))[:most].strip("-") or "model"
