"""An option has an effect or is refused, alone and beside any other of its verb: nothing that is typed does nothing.

An effect is a difference in what the command prints as JSON, in its exit code, or in a file. These tests take a sample
drawn by a seed; `python -m benchmarks.soak.option_pairs` takes every option and every two options of every verb.
"""

import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from latfit.cli.app import run
from tests.cli.option_values import BASE, given, options_of, prepare

REFUSED = 2
SPOKEN = (0, 5, 8)
"""Exit codes of commands that print their answer."""

NOT_RUN = frozenset({"profile", "demo", "simulate study"})
"""What they print differs from run to run, or they take long."""

SLOW = frozenset({"fit", "compare", "plan", "simulate policies", "report"})
"""Verbs of which the tests take SINGLES options and no pairs."""

SINGLES = 3
PAIRS = 60  # of all verbs together

INVISIBLE: dict[str, str] = {
    "--quiet": "takes away notes, of which there may be none",
    "--verbose": "shows more where there is more",
    "--workers": "decides how fast it goes, not what comes out",
    "--prefill-requests": "tells prefill from mixed steps, which a fit may take together",
    "--swap": "acts where requests are preempted, which these may not be",
    "--backend": "decides where it is computed",
    "--allow-drops": "permits what these rows do not need",
    "--format": "names what auto finds by itself",
    "--strict": "refuses what these results are not",
    "--skip-bad": "permits what these files do not need",
    "--force": "permits what these fits do not need",
    "--each": "takes systems apart, of which these steps may name none",
    "compare --path": "chooses one of several, and these runs have one",
    "compare --seed": "decides by which folds a model is chosen, and these are of one model",
    "--resume": "takes over what a file holds already, which here is nothing",
}
"""Options, of all verbs or of one, that may rightly leave a result as it is, and why."""

TOGETHER = {
    frozenset({"--prefill-requests", "--prefill-tokens"}): "a step without the one has none of the other",
    frozenset({"--force", "--max-error"}): "--force is what is added once --max-error has refused",
    frozenset({"--precision", "--replications"}): "replications are the fewest of a run that is to be precise",
    frozenset({"--kv-blocks", "--block-size"}): "of blocks that are plenty the size does not matter",
    frozenset({"--kv-blocks", "--order"}): "where blocks are plenty nobody waits, and there is nothing to order",
    **{
        frozenset({"validate", each, "--route"}): "requests so few, so evenly, are served alike wherever they are sent"
        for each in ("--replicas-at", "--autoscale")
    },
    frozenset({"--sla", "--ttft"}): "one share of requests is counted that meet all targets",
    frozenset({"--sla", "--tpot"}): "one share of requests is counted that meet all targets",
    **{frozenset({"--class", each}): "a class may have a target of its own" for each in ("--sla", "--ttft", "--tpot")},
    frozenset({"--ttft", "--tpot"}): "one share of requests is counted that meet all targets",
}
"""Options, of all verbs or of one, of which one may say what the other says, and why."""

TIMES = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.\d]*(?:Z|\+00:00)?")
PASSING = frozenset({"provenance", "command", "made_at", "elapsed_s"})
"""Keys of JSON that say how and when it was made."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its code, what it said, and its files."""

    code: int
    printed: str
    error: str
    files: tuple[tuple[str, str], ...]

    @property
    def refused(self) -> bool:
        return self.code == REFUSED

    @property
    def effect(self) -> object:
        return self.code, self.printed, self.files, self.error if self.code not in SPOKEN else ""


class Trials:
    """Outcomes of command lines, each run once, in copies of a folder of inputs."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.place = folder / "inputs", folder / "run"
        self.known: dict[tuple[str, ...], Outcome] = {}
        self.inputs.mkdir()
        before = Path.cwd()
        os.chdir(self.inputs)
        with redirect_stdout(io.StringIO()):
            prepare()
        os.chdir(before)

    @cached_property
    def texts(self) -> dict[str, str]:
        return {name: _told(file) for name, file in _files(self.inputs).items()}

    @cached_property
    def as_copied(self) -> dict[str, tuple[int, int]]:
        return {name: _mark(file) for name, file in _files(self.inputs).items()}

    def outcome(self, verb: str, *options: Sequence[str]) -> Outcome:
        shown = [] if any(option[0] in ("--json", "--verbose") for option in options) else ["--json"]
        line = (*verb.split(), *BASE[verb], *(word for option in options for word in option), *shown)
        if line not in self.known:
            self.known[line] = self._run(line)
        return self.known[line]

    def _run(self, line: Sequence[str]) -> Outcome:
        shutil.copytree(self.inputs, self.place)
        before, out, err = Path.cwd(), io.StringIO(), io.StringIO()
        os.chdir(self.place)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = run(list(line))
            written = {name: file for name, file in _files(Path()).items() if _mark(file) != self.as_copied.get(name)}
            told = {name: _told(file) for name, file in written.items()}
        finally:
            os.chdir(before)
            shutil.rmtree(self.place)
        changed = tuple((name, text) for name, text in told.items() if self.texts.get(name) != text)
        return Outcome(code, _lasting(out.getvalue()), err.getvalue(), changed)


def _files(folder: Path) -> dict[str, Path]:
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _mark(file: Path) -> tuple[int, int]:
    """What a copy has of the file it is of, until it is written."""
    return file.stat().st_size, file.stat().st_mtime_ns


def _told(file: Path) -> str:
    """What a file says, without when it was made."""
    if file.suffix == ".json":
        return _lasting(file.read_text())
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        return str(pq.read_table(file).replace_schema_metadata(None).to_pydict()) if file.stat().st_size else ""
    if file.suffix == ".html":
        return TIMES.sub("", file.read_text())
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _lasting(text: str) -> str:
    try:
        return json.dumps(_without(json.loads(text)))
    except ValueError:
        return TIMES.sub("", text)


def _without(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without(value) for name, value in document.items() if name not in PASSING}
    return [_without(each) for each in document] if isinstance(document, list) else document


def tried_options(verb: str) -> list[str]:
    return [option for option in options_of(verb) if option != "--json" and not _invisible(verb, option)]


def all_pairs(verb: str) -> Iterable[tuple[str, str]]:
    for pair in itertools.combinations(options_of(verb), 2):
        if frozenset(pair) not in TOGETHER and frozenset({verb, *pair}) not in TOGETHER:
            yield pair


def idle_alone(trials: Trials, verb: str, option: str) -> list[str]:
    """What is wrong with an option by itself: it does nothing, or its refusal does not name it."""
    alone = trials.outcome(verb, given(verb, option))
    if not alone.refused and alone.effect == trials.outcome(verb).effect:
        return [f"{verb} {' '.join(given(verb, option))} does nothing"]
    if alone.refused and not _named(alone):
        return [f"{verb} {' '.join(given(verb, option))}: refused as {alone.error.splitlines()[0]}"]
    return []


def idle_in_pair(trials: Trials, verb: str, pair: tuple[str, str]) -> list[str]:
    """What is wrong with two options together: one of them does nothing, or their refusal names none."""
    found = []
    one, other = (given(verb, option) for option in pair)
    both = trials.outcome(verb, one, other)
    if both.refused:
        return [] if _named(both) else [f"{verb} {' '.join([*one, *other])}: refused as {both.error.splitlines()[0]}"]
    for option, beside in zip(pair, (other, one), strict=True):
        without = trials.outcome(verb, beside)
        # Tables are rounded: beside --verbose, which says what JSON says, an effect may not be seen.
        visible = "--verbose" not in pair and option != "--json" and not _invisible(verb, option)
        if visible and without.code in SPOKEN and without.effect == both.effect:
            found.append(f"{verb} {' '.join(beside)}: {option} does nothing")
    return found


def _invisible(verb: str, option: str) -> bool:
    return option in INVISIBLE or f"{verb} {option}" in INVISIBLE


def _named(outcome: Outcome) -> bool:
    """Whether a refusal says which option it is about."""
    return bool(re.match(r"latfit: (Invalid value for )?'?-", outcome.error))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("options"))


def sample() -> tuple[list[tuple[str, str]], list[tuple[str, tuple[str, str]]]]:
    """(verb, option) and (verb, pair) that the tests try."""
    rng = random.Random(0)
    singles: list[tuple[str, str]] = []
    pairs: list[tuple[str, tuple[str, str]]] = []
    for verb in BASE:
        if verb in NOT_RUN:
            continue
        options = tried_options(verb)
        chosen = rng.sample(options, min(SINGLES, len(options))) if verb in SLOW else options
        singles += [(verb, option) for option in chosen]
        pairs += [(verb, pair) for pair in all_pairs(verb) if verb not in SLOW]
    return singles, rng.sample(pairs, PAIRS)


ALONE, TWO = sample()


@pytest.mark.parametrize(("verb", "option"), ALONE)
def test_an_option_has_an_effect_or_is_refused(trials: Trials, verb: str, option: str) -> None:
    assert trials.outcome(verb).code in SPOKEN, trials.outcome(verb).error
    assert idle_alone(trials, verb, option) == []


@pytest.mark.parametrize(("verb", "pair"), TWO, ids=[" ".join([verb, *pair]) for verb, pair in TWO])
def test_an_option_has_an_effect_beside_another_or_they_are_refused(
    trials: Trials, verb: str, pair: tuple[str, str]
) -> None:
    assert idle_in_pair(trials, verb, pair) == []
