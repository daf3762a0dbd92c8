"""Examples of the pages: their commands, what these have to print, and when a printed line says the same."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code on a page; one with a title is a file of that name."""

    language: str
    title: str
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def all_blocks(page: Path) -> list[Block]:
    """In the order of the page."""
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def blocks(page: Path, language: str) -> list[str]:
    return [block.text for block in all_blocks(page) if block.language == language]


def commands(page: Path) -> list[tuple[list[str], list[str]]]:
    """(arguments, lines that must be printed) of every command shown with its output, in order."""
    return [each for block in blocks(page, "console") for each in commands_of(block)]


def commands_of(block: str) -> list[tuple[list[str], list[str]]]:
    found: list[tuple[list[str], list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ latfit "):
            found.append((shlex.split(line.removeprefix("$ latfit "), comments=True), []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def typed(block: str) -> list[str]:
    """The commands of latfit in a block that is not run, with continued lines joined."""
    joined = block.replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined if re.match(r"latfit (?!.*[<|])", line.strip())]


CUT = "..."
"""The line that says that a page leaves out some of what is printed."""


def unlike(shown: list[str], out: str, err: str) -> str:
    """What is wrong with the lines that a page shows of a command's output, if anything."""
    if CUT in shown:
        shown = [line for line in shown if line != CUT]
    elif more := missing([line for line in out.splitlines() if line.strip()], shown):
        return f"cut without saying so: {more}"
    absent = missing(shown, (out + err).splitlines())
    return f"not printed: {absent}" if absent else ""


def missing(shown: list[str], printed: list[str]) -> list[str]:
    """The lines of a page that no printed line says."""
    return [line for line in shown if not any(same(line, other) for other in printed)]


def same(shown: str, printed: str) -> bool:
    """Whether a line says what a page shows: its words, and its numbers to the last digit but one unit of it. What is
    counted in fewer than three digits has to be the same; widths of columns do not matter."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    return all(_close(a, b) for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True))


def _close(shown: str, printed: str) -> bool:
    decimals = max(len(number.partition(".")[2]) for number in (shown, printed))
    digits = len(re.sub(r"\D", "", shown))
    unit = 10.0 ** -min(len(number.partition(".")[2]) for number in (shown, printed))
    a, b = (float(number.replace(",", "")) for number in (shown, printed))
    return abs(a - b) <= (unit * 1.000001 if decimals or digits > 2 else 0)
