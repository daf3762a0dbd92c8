"""README's measured figures are those of docs/evidence/, and the page is written and read as it should be.

What a section would show that has not been run in full yet is skipped; `python -m benchmarks.evidence --only NAME`
runs it.
"""

import re
from pathlib import Path

import pytest
from benchmarks import evidence
from benchmarks.evidence import DOCS, SECTIONS, Section, figures, read

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
SMALL = Section("small", "Small?", ("-c", "print('  4 of 5')"), ("-c", "print('1 of 1')"))
BROKEN = Section("broken", "Broken?", ("-c", "print('lost'); raise SystemExit(3)"), ())


def shown(section: str) -> str:
    text = figures(DOCS, section)
    if not text or ": skipped" in text:
        pytest.skip(f"python -m benchmarks.evidence --only {section} has not been run in full")
    return text


def errors(text: str, system: str, row: str) -> list[float]:
    """MAPE of rows left out at random, all steps, of the systems whose label begins so."""
    parts = re.split(r"\n(?=\S+.*: [\d,]+ rows)", text)
    return [
        float(found[1])
        for part in parts
        if part.lstrip("\n").startswith(system)
        for found in re.finditer(rf"^{re.escape(row)} +([\d.]+)", part, re.MULTILINE)
    ]


def said(pattern: str) -> list[float]:
    """The numbers of a sentence or a row of README."""
    found = re.search(pattern, " ".join(README.split()))
    assert found, pattern
    return [float(number) for number in found.groups()]


@pytest.mark.parametrize(
    ("name", "label"), [("latency", "latency"), ("time to first token", "TTFT"), ("time per output token", "TPOT")]
)
def test_the_validated_run(name: str, label: str) -> None:
    (within,) = said(rf"mean {name} (?:came out )?within ([\d.]+) %")
    row = next(line for line in shown("validated").splitlines() if line.startswith(label))
    assert abs(float(re.findall(r"([+-][\d.]+) %", row)[0])) <= within


@pytest.mark.parametrize(
    ("row", "system"),
    [
        ("RTX 4090, Llama", "llmservingsim"),
        ("A100, A40 and H100", "vidur"),
        ("A100 and H100", "splitwise"),
        ("serving logs", "ibm"),
    ],
)
def test_accuracy_on_public_measurements(row: str, system: str) -> None:
    cells = re.search(rf"\| {row}[^|]*\| ([^|]+)\| ([^|]+)\| ([^|]+)\|", README)
    assert cells, row
    text = shown("accuracy")
    for cell, model in zip(cells.groups(), ("physics + correction", "line", "random forest"), strict=True):
        found = errors(text, system, model)
        told = [float(number) for number in re.findall(r"[\d.]+", cell.split("%")[0])]
        assert told == [round(each, 1) for each in sorted({min(found), max(found)})]


def test_a_section_is_written_and_replaced_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "SECTIONS", (SMALL, BROKEN))
    assert evidence.main([], False, tmp_path) == 1
    assert figures(tmp_path, "small") == "  4 of 5\n"
    broken = read(tmp_path, "broken")
    assert "exit code 3" in broken[0]
    assert evidence.main(["small"], True, tmp_path) == 0
    assert figures(tmp_path, "small") == "", "a small run has no figures to be quoted"
    assert read(tmp_path, "broken") == broken
    assert "[broken](evidence/broken.txt)" in (tmp_path / "evidence.md").read_text()


def test_the_page_says_what_ran_where() -> None:
    page = (DOCS / "evidence.md").read_text()
    for section in SECTIONS:
        facts, _ = read(DOCS, section.name)
        assert section.question in page
        assert not facts or re.match(
            r"\d+ \w+ \d{4}; latfit [\d.]+ of commit \w+; .* cores, .*; Python [\d.]+, .*; [\d.,]+ s, exit code",
            facts,
        )


def test_every_section_is_a_benchmark_that_is_there() -> None:
    for section in SECTIONS:
        folder = ROOT / "benchmarks"
        assert any(
            place.exists()
            for place in (folder / f"{section.name}.py", folder / section.name, folder / "soak" / f"{section.name}.py")
        ), section.name
