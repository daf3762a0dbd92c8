"""Files of other programs, read without latfit: YAML by PyYAML, shell by shlex, protobuf's text format by hand."""

import re
import shlex
from typing import Any

import yaml

TOKEN = re.compile(r'\s*(?:#[^\n]*\n|("(?:[^"\\]|\\.)*")|([{}\[\]:,])|([^\s{}\[\]:,#"]+))')


def read_yaml(text: str) -> Any:
    return yaml.safe_load(text)


def read_yamls(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def options(script: str) -> list[str]:
    """The words of the array that a script passes on."""
    inside = script.partition("options=(\n")[2].rpartition("\n)\n")[0]
    return shlex.split(inside, comments=True)


def program(script: str) -> list[str]:
    """The words of the last line."""
    return shlex.split(script.rstrip().splitlines()[-1])


def commented(text: str, marker: str = "#") -> dict[str, str]:
    """What stands in the comment right above a line, by the line."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith(marker):
            above.append(line.removeprefix(marker).strip())
        else:
            found[line], above = " ".join(above), []
    return found


def read_pbtxt(text: str) -> dict[str, Any]:
    """A message: values by field, those that are named twice or in brackets as lists."""
    tokens = [next(filter(None, found.groups())) for found in TOKEN.finditer(text) if any(found.groups())]
    message, rest = _message(tokens)
    assert not rest
    return message


def _message(tokens: list[str]) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    while tokens and tokens[0] != "}":
        name, tokens = tokens[0], tokens[1:]
        if tokens[0] == ":":
            tokens = tokens[1:]
        found[name], tokens = _value(tokens)
    return found, tokens


def _value(tokens: list[str]) -> tuple[Any, list[str]]:
    if tokens[0] == "{":
        message, rest = _message(tokens[1:])
        return message, rest[1:]
    if tokens[0] == "[":
        items, tokens = [], tokens[1:]
        while tokens[0] != "]":
            item, tokens = _value(tokens)
            items.append(item)
            tokens = tokens[1:] if tokens[0] == "," else tokens
        return items, tokens[1:]
    word = tokens[0]
    if word.startswith('"'):
        raw = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word[1:-1])
        return raw.encode("latin-1").decode(), tokens[1:]
    return int(word) if word.lstrip("-").isdigit() else word, tokens[1:]
