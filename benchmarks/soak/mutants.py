"""Damaged files against every command that reads files: each ends well or in an error of ours, in time and memory.

`python -m benchmarks.soak.mutants --n 20000 --seed 1` takes whole files of every format (`seeds.py`), damages one or
more things in each (a value of another type, a number that nobody counts to, a missing or doubled column, a cell too
many, bytes outside the encoding, a torn end, nesting, single bytes), and hands the result to a command in this process.
A case is found again by its number: `--only 1234`.

Outcomes: `ok`, `refused` (an error with found, where and remedy), and those that are failures: `traceback`, `timeout`,
`memory` (an error for lack of memory, or `MOST_BYTES` more than before), `lost` (a written trace that is refused or has
other rows when it is read again) and `killed` (the process ended).
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from benchmarks.soak.seeds import (
    CELLS,
    CURVE,
    FIT,
    GOOD_FIT,
    GOOD_PROFILE,
    GOOD_TRACE,
    HARDWARE,
    JOURNAL,
    PLAN,
    PLAN_OF_BATCHES,
    REQUESTS,
    SERVED,
    STEPS,
    TRACE,
    Seed,
    make_seeds,
    run_quietly,
)

SECONDS, HANGS_S = 30, 300
"""Of processor time, whoever else is busy; and by the clock."""
MOST_BYTES = 1 << 30
ADDRESS_SPACE = 3 << 30
CASES_A_PROCESS = 200
GOOD = ("ok", "refused")

PATHS = ["--path", "gpu=8ms+0.05ms*256", "--policy", "gpu-only"]
DRAWN = ["--requests", "300", "--replications", "2"]
NOMINAL = ["--hardware", GOOD_PROFILE]
ENGINE = ["--batching", "chunked-prefill", "--kv-blocks", "4000"]
RUN = ["--requests", "50", "--replications", "1", "--lengths", "32:4", "--rate", "5/s"]

TRACE_COMMANDS: Sequence[Sequence[str]] = (
    ["ingest", "FILE", "--out", "again.parquet", "--allow-drops"],
    ["ingest", "FILE", "--out", "again.parquet"],
    ["trace", "show", "FILE"],
    ["evaluate", GOOD_FIT, "FILE", "--allow-drops", "--force"],
    ["fit", "FILE", "--model", "linear", "--allow-drops", "--out", "f.fit.json", "--hardware", "f.json", "--force"],
)
STEP_COMMANDS: Sequence[Sequence[str]] = (*TRACE_COMMANDS, ["predict", GOOD_FIT, "--data", "FILE"])
REQUEST_COMMANDS: Sequence[Sequence[str]] = (
    ["simulate", "engine", *ENGINE, "--fit", GOOD_FIT, "--arrivals", "FILE"],
    ["simulate", "policies", *PATHS, "--arrivals", "FILE"],
    ["plan", "--sla", "40ms", *NOMINAL, "--tokens-per-request", "1", "--arrivals", "FILE", "--laws-only"],
    ["plan", "--ttft", "500ms", "--tpot", "50ms", *NOMINAL, "--replicas", "1", "--arrivals", "FILE"],
)
COMMANDS: dict[str, Sequence[Sequence[str]]] = {
    TRACE: TRACE_COMMANDS,
    STEPS: STEP_COMMANDS,
    CELLS: (
        *STEP_COMMANDS,
        ["fit", "FILE", "--model", "linear", "--cells", "--out", "f.fit.json", "--hardware", "f.json", "--force"],
    ),
    REQUESTS: REQUEST_COMMANDS,
    SERVED: (*REQUEST_COMMANDS, ["validate", GOOD_FIT, "FILE", "--kv-blocks", "4000"]),
    CURVE: (
        ["simulate", "policies", *PATHS, *DRAWN, "--set", "load_curve=FILE"],
        ["plan", "--sla", "40ms", *NOMINAL, "--arrivals", "FILE", "--laws-only"],
    ),
    FIT: (
        ["predict", "FILE", "-B", "8", "-S", "64", "-S", "9999"],
        ["predict", "FILE", "-B", "8", "--sensitivity"],
        ["evaluate", "FILE", GOOD_TRACE],
        ["compare", "FILE", GOOD_FIT],
        ["simulate", "engine", *ENGINE, "--fit", "FILE", *RUN],
        ["hardware", "add", "cpu", "FILE", "--hardware", "f.json", "--force"],
        ["hardware", "show", "--hardware", "FILE"],
        ["report", "--hardware", "FILE", "--out", "pages"],
    ),
    HARDWARE: (
        ["hardware", "show", "--hardware", "FILE"],
        ["hardware", "add", "x", "--nominal", "p50=2ms", "--hardware", "FILE"],
        ["plan", "--sla", "40ms", "--hardware", "FILE", "--rate", "5/s", "--laws-only"],
        ["plan", "--sla", "12ms", "--hardware", "FILE"],  # reached by steps that the fit has seen
        ["simulate", "policies", "--policy", "gpu-only", *DRAWN, "--rate", "5/s", "--hardware", "FILE"],
    ),
    PLAN: (["export", "vllm", "FILE"], ["export", "kubernetes", "FILE", "--model", "m"], ["export", "sglang", "FILE"]),
    PLAN_OF_BATCHES: (["export", "triton", "FILE"], ["export", "tensorrt", "FILE", "--shape", "input:Bx3"]),
    JOURNAL: (["journal", "FILE"],),
}
"""By kind of input. Each ends with exit code 0 on a whole file, which `check_seeds` asserts: a command that refuses the
whole file never gets to the damage."""

SLOW = ("report", "plan", "fit", "compare")
"""Verbs that take a second: every tenth case that could be theirs is."""


NUMBERS = (
    0,
    -1,
    1,
    2,
    0.5,
    1e-300,
    5e-324,
    1e9,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1e16,
    1e300,
    -1e300,
)
ODD: tuple[Any, ...] = (
    *NUMBERS,
    *(float("nan"), float("inf"), float("-inf")),
    *(None, True, False, "", " ", "x", "nan", "1e400", "-", "1,5", "ü€", "\ud800", "\0", "a" * 5000, "9" * 5000),
    *([], {}, [1], [None], [[]], [[1, 2], [3]], {"a": 1}, {"values": [1]}, [float("nan")] * 3),
)


def deep(levels: int) -> str:
    """A JSON list in a list in a list."""
    return "[" * levels + "]" * levels


def damaged(seed: Seed, rng: random.Random) -> bytes:
    """The content with one to three things damaged, each in a way that its format allows."""
    content = seed.content
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = rng.choice(_ways(seed.name))(content, rng)
    return content


def _ways(name: str) -> Sequence[Callable[[bytes, random.Random], bytes]]:
    if name.endswith((".json", ".jsonl", ".journal")):
        return (in_json, in_json, in_json, in_json, in_text, in_lines, in_bytes)
    if name.endswith(".parquet"):
        return (in_columns, in_columns, in_columns, in_columns, in_bytes, torn)
    if name.endswith((".csv", ".tsv")):
        return (in_cells, in_cells, in_cells, in_header, in_lines, in_text, in_bytes, recoded)
    return (in_text, in_lines, in_bytes, in_bytes, torn)


def in_bytes(content: bytes, rng: random.Random) -> bytes:
    """Some bytes are others."""
    found = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 3, 20))):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def torn(content: bytes, rng: random.Random) -> bytes:
    """The end, the beginning or a piece is missing, or a piece comes twice."""
    a, b = sorted((rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)))
    return rng.choice((content[:a], content[a:], content[:a] + content[b:], content[:b] + content[a:]))


def in_text(content: bytes, rng: random.Random) -> bytes:
    """A word is put in, or put in place of a number."""
    words = [json.dumps(odd).encode("utf-8", "surrogatepass") for odd in ODD]
    words += [
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r",
        b'"',
        b"\xed\xa0\x80",
        b"\x1b[0m",
        deep(5000).encode(),
        b"(",
        b"Iteration(",
    ]
    place, word = rng.randrange(len(content) + 1), rng.choice(words)
    if rng.random() < 0.5:
        return content[:place] + word + content[place:]
    end = place
    while end < len(content) and content[end : end + 1] in b"0123456789.":
        end += 1
    return content[:place] + word + content[end:]


def in_lines(content: bytes, rng: random.Random) -> bytes:
    """Lines are swapped, doubled, dropped, cut, joined or repeated a thousand times."""
    lines = content.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(6)
    if way == 0:
        lines[a], lines[b] = lines[b], lines[a]
    elif way == 1:
        lines.insert(a, lines[b])
    elif way == 2:
        del lines[a]
    elif way == 3:
        lines[a] = lines[a][: rng.randrange(len(lines[a]) + 1)]
    elif way == 4:
        lines[a : a + 2] = [b"".join(lines[a : a + 2])]
    else:
        lines[a:a] = [lines[b]] * 1000
    return b"\n".join(lines)


def recoded(content: bytes, rng: random.Random) -> bytes:
    """The text in another encoding."""
    text = content.decode("utf-8", "replace")
    return text.encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cp037")), "replace")


def _rows(content: bytes) -> tuple[str, list[list[str]]]:
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    separator = "\t" if "\t" in text else ","
    return separator, [line.split(separator) for line in text.split("\n")]


def _joined(separator: str, rows: Sequence[Sequence[str]]) -> bytes:
    return "\n".join(map(separator.join, rows)).encode("utf-8", "surrogatepass")


def in_cells(content: bytes, rng: random.Random) -> bytes:
    """Cells are odd: one, all of a column, all of a row; a row has more or fewer of them."""
    separator, rows = _rows(content)
    a, column, odd = rng.randrange(len(rows)), rng.randrange(len(rows[0])), rng.choice(ODD)
    cell = odd if isinstance(odd, str) else json.dumps(odd)
    way = rng.randrange(5)
    if way == 0:
        rows[a] = [cell for _ in rows[a]]
    elif way == 1:
        rows[a] = rows[a] + [cell] * rng.choice((1, 3))
    elif way == 2:
        rows[a] = rows[a][:-1]
    else:
        for row in rows[1:] if way == 3 else rows[a : a + 1]:
            if column < len(row):
                row[column] = cell
    return _joined(separator, rows)


def in_header(content: bytes, rng: random.Random) -> bytes:
    """A column is doubled, dropped, or has another name."""
    separator, rows = _rows(content)
    a, b = rng.randrange(len(rows[0])), rng.randrange(len(rows[0]))
    way = rng.randrange(4)
    if way == 0:
        rows = [[*row, *row[a : a + 1]] for row in rows]
    elif way == 1:
        rows = [row[:a] + row[a + 1 :] for row in rows]
    elif way == 2:
        rows[0][a] = rows[0][b]
    else:
        rows[0][a] = rng.choice(("", "B", "cell_rows", "t_s", "\ud800", "model", "x" * 5000, "warmup", '"'))
    return _joined(separator, rows)


def in_json(content: bytes, rng: random.Random) -> bytes:
    """Values anywhere in the document are odd, doubled, dropped, or nested too deep."""
    text = content.decode("utf-8", "replace")
    try:
        documents, many = [json.loads(text)], False
    except (ValueError, RecursionError):
        documents, many = [], True
        for line in text.splitlines():
            try:
                documents.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    if not documents:
        return in_bytes(content, rng)
    document = rng.choice(documents)
    for _ in range(rng.choice((1, 1, 1, 4))):
        places = list(_places(document))
        if places:
            _change(*rng.choice(places), rng)
    try:
        text = ("\n" if many else "").join(
            json.dumps(each, indent=rng.choice((None, 1)) if not many else None) for each in documents
        )
    except RecursionError:  # nested too deep by the first thing that was done to it
        return torn(content, rng)
    return text.replace('"DEEP"', deep(rng.choice((500, 100_000)))).encode("utf-8", "surrogatepass")


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every (container, key)."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries)[:60] if depth < 12 else ():
        # what stands high is chosen as often as what stands deep
        yield from [(value, key)] * max(1, 8 >> depth)
        yield from _places(inner, depth + 1)


def _change(container: Any, key: Any, rng: random.Random) -> None:
    way = rng.randrange(10)
    if way == 0:
        del container[key]
    elif way == 1 and isinstance(container, dict):
        container[rng.choice(("", "more", "\ud800", "value", "B"))] = container[key]
    elif way == 2 and isinstance(container[key], list):
        container[key] = rng.choice(
            (container[key][:1], container[key] * 3, container[key][::-1], [*container[key], None])
        )
    elif way == 3:
        container[key] = "DEEP"
    elif way == 4:
        container[key] = [container[key]]
    elif way in (5, 6) and isinstance(container[key], int | float):
        container[key] = rng.choice(NUMBERS)
    else:
        container[key] = deepcopy(rng.choice(ODD))


def in_columns(content: bytes, rng: random.Random) -> bytes:
    """A column of a Parquet file has another type, odd numbers, gaps or a long label; columns or metadata are odd."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(BytesIO(content))
        names = table.column_names
    except (pa.ArrowException, OSError, ValueError, MemoryError):
        return in_bytes(content, rng)
    n, place = len(table), rng.randrange(max(table.num_columns, 1))
    if not table.num_columns:
        return content
    way = rng.randrange(8)
    if way == 0:
        table = table.append_column(names[rng.randrange(len(names))], table.column(place))
    elif way == 1:
        table = table.remove_column(place)
    elif way == 2:
        provenance: Any = rng.choice(
            (None, [], 1, "x", {"parts": None}, {"parts": []}, {"cells": None}, {"cells": {"rows_read": "x"}})
        )
        stored = rng.choice(
            (
                b"",
                b"\xff",
                deep(100_000).encode(),
                b"null",
                b"[]",
                json.dumps({"schema": "latfit.trace/1", "provenance": provenance}).encode(),
            )
        )
        table = table.replace_schema_metadata({b"latfit": stored})
    elif way == 3:
        name = rng.choice(("cell_rows", "", " B", "x\0", "hardware", "tp", "rep", "replica", "idle", "kv_usage"))
        table = table.rename_columns([*names[:place], name, *names[place + 1 :]])
    else:
        table = table.set_column(place, names[place], _odd_column(table.column(place), n, rng))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression=rng.choice(("zstd", "snappy", "none")))
    return bytes(sink.getvalue().to_pybytes())


def _odd_column(column: Any, n: int, rng: random.Random) -> Any:
    import pyarrow as pa

    values = column.to_pylist()
    some = rng.randrange(n) if n else 0
    odd = rng.choice((*NUMBERS, float("nan"), float("inf"), float("-inf")))
    makers: tuple[Callable[[], Any], ...] = (
        lambda: pa.array([str(value) for value in values]),
        lambda: pa.array([None] * n),
        lambda: pa.array([[1, 2]] * n),
        lambda: pa.array([{"a": 1}] * n),
        lambda: pa.array([b"\xff\xfe"] * n),
        lambda: pa.array(values).cast(pa.float32()),
        lambda: pa.array([None if i == some else value for i, value in enumerate(values)]),
        lambda: pa.array([float(odd)] * n),
        lambda: pa.array([float(odd) if i == some else float(value) for i, value in enumerate(values)]),
        lambda: pa.array([i for i, _ in enumerate(values)], pa.timestamp("ns")),
        lambda: pa.array([i for i, _ in enumerate(values)], pa.duration("s")),
        lambda: pa.array(list(range(n)), pa.decimal128(20, 2)),
        lambda: pa.array(["l" * (1 << 20)] * n).dictionary_encode(),
        lambda: pa.array([2**63 + i for i in range(n)], pa.uint64()),
        lambda: pa.array([True] * n),
        lambda: pa.array([i % 100 for i in range(n)], pa.int8()),
        lambda: pa.array([float(i) for i in range(n)], pa.float64()).cast(pa.float16()),
    )
    try:
        return rng.choice(makers)()
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.array([None] * n)


def check_seeds(seeds: Sequence[Seed]) -> None:
    """Run every command on the whole file. Raises RuntimeError where one is refused or fails."""
    for name, seed in {seed.name: seed for seed in seeds}.items():
        for command in COMMANDS[seed.kind]:
            Path(name).write_bytes(seed.content)
            words = [word.replace("FILE", name) for word in command]
            if command[0] == "journal":
                _continue(Path(name))
            else:
                run_quietly(words)


@dataclass(frozen=True)
class Case:
    """One damaged file and the command that is given it. kind, words: the outcome, and what was said last."""

    number: int
    seed: str
    command: str
    kind: str = ""
    words: str = ""


def _case(seeds: Sequence[Seed], seed: int, number: int) -> tuple[Seed, bytes, list[str]]:
    rng = random.Random(seed * 1_000_003 + number)
    chosen = rng.choice(seeds)
    content = damaged(chosen, rng)
    commands = list(COMMANDS[chosen.kind])
    quick = [command for command in commands if command[0] not in SLOW]
    command = rng.choice(quick if quick and rng.random() < 0.9 else commands)
    return chosen, content, [word.replace("FILE", chosen.name) for word in command]


SAID_EVERY = 500


class TooLate(BaseException):
    """The time of a case is over."""


def _late(*_: object) -> None:
    raise TooLate


def tried(arguments: Sequence[str]) -> tuple[str, str]:
    """(outcome, what was said) of one command, before anything at the top of the program could catch it."""
    from latfit.cli.app import _CLICK_ERROR, app
    from latfit.errors import LatfitError

    said = StringIO()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with redirect_stdout(StringIO()), redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("error")
            if arguments[0] == "journal":
                _continue(Path(arguments[1]))
            else:
                app(args=list(arguments), prog_name="latfit", standalone_mode=False)
        kind, words = "ok", ""
    except LatfitError as error:
        kind, words = ("refused" if error.found and error.remedy else "traceback"), str(error)
    except _CLICK_ERROR as error:
        kind, words = "refused", str(error)
    except SystemExit:
        kind, words = "ok", ""
    except TooLate:
        kind, words = "timeout", traceback.format_exc(limit=-4)
    except MemoryError:
        kind, words = "memory", traceback.format_exc(limit=-6)
    except Exception:  # noqa: BLE001  this is what is looked for
        kind, words = "traceback", traceback.format_exc(limit=-6)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 > MOST_BYTES and kind in GOOD:
        return "memory", f"more than {MOST_BYTES >> 20} MiB"
    return kind, words


def _continue(file: Path) -> None:
    """What `profile --resume` does with a journal before it measures."""
    from latfit.profiling.grid import ProfileRequest
    from latfit.profiling.journal import Journal

    Journal(file, ProfileRequest(grid="B=1,2;S=1,4"), resume=True).close(finished=False, stored=False)


def _again(arguments: Sequence[str]) -> tuple[str, str]:
    """Whether a trace that was just written is read as it is: no row dropped, none changed."""
    import numpy as np

    from latfit.errors import LatfitError
    from latfit.trace import ingest

    if arguments[0] != "ingest":
        return "ok", ""
    try:
        written = ingest("again.parquet")
    except LatfitError as error:
        # what is believable depends on the other rows, so that rules of the second reading may find more
        return ("ok", "") if "would be dropped" in error.found else ("lost", str(error))
    known = {"zero_time", "cold_start", "duplicate"}
    if set(written.dropped) - known:
        return "lost", f"dropped {dict(written.dropped)}"
    for name in ("B", "S", "T_ms"):
        if not np.all(np.isfinite(written.trace.floats(name))) or not np.all(written.trace.floats(name) > 0):
            return "lost", f"column {name}"
    return "ok", ""


def outcome(seeds: Sequence[Seed], seed: int, number: int) -> Case:
    """Of one case; the working folder holds the good files."""
    chosen, content, arguments = _case(seeds, seed, number)
    Path(chosen.name).write_bytes(content)
    for sent in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(sent, _late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(HANGS_S)
    try:
        kind, words = tried(arguments)
        if kind == "ok":
            kind, words = _again(arguments)
    except TooLate:
        kind, words = "timeout", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return Case(number, chosen.name, " ".join(arguments), kind, words)


def _child(seeds: Sequence[Seed], seed: int, numbers: Sequence[int], out: int) -> None:
    """Try the cases one after another, and write each outcome as a line."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE,) * 2)
    with os.fdopen(out, "w") as stream:
        for number in numbers:
            stream.write(json.dumps(vars(outcome(seeds, seed, number))) + "\n")
            stream.flush()


def cases(seeds: Sequence[Seed], seed: int, numbers: Sequence[int]) -> Iterator[Case]:
    """All outcomes; a process that ends early loses the case it was at, and another goes on behind it."""
    left = list(numbers)
    while left:
        block = left[:CASES_A_PROCESS]
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                _child(seeds, seed, block, write)
            finally:
                os._exit(0)
        os.close(write)
        done = 0
        with os.fdopen(read) as stream:
            for line in stream:
                done += 1
                yield Case(**json.loads(line))
        _, status = os.waitpid(child, 0)
        if done < len(block):
            chosen, _, arguments = _case(seeds, seed, block[done])
            yield Case(block[done], chosen.name, " ".join(arguments), "killed", f"status {status}")
            done += 1
        left = left[done:]


def main(n: int = 20_000, seed: int = 1, only: int | None = None, kind: str | None = None) -> int:
    """Print the count of each outcome and every failure; 1 where there is one. kind: of input, all without it."""
    counts: Counter[str] = Counter()
    start, here = time.perf_counter(), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="latfit-mutants-") as folder:
        os.chdir(folder)
        try:
            seeds = [each for each in make_seeds() if kind in (None, each.kind)]
            check_seeds(seeds)
            for case in cases(seeds, seed, range(n) if only is None else [only]):
                counts[case.kind] += 1
                if counts.total() % SAID_EVERY == 0:
                    print(f"{counts.total():,} of {n:,}: {_told(counts)}", flush=True)
                if case.kind not in GOOD or only is not None:
                    print(
                        f"{case.kind}: case {case.number}, {case.seed}: latfit {case.command}\n{case.words}", flush=True
                    )
        finally:
            os.chdir(here)
    print(f"{counts.total():,} damaged files: {_told(counts)} ({time.perf_counter() - start:.0f} s)")
    return int(any(kind not in GOOD for kind in counts))


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kind", choices=list(COMMANDS))
    given = parser.parse_args()
    sys.exit(main(given.n, given.seed, given.only, given.kind))
