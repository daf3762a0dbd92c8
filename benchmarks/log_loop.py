"""The loop that people write for a vLLM log: a regular expression a line, with nothing else imported. `python
benchmarks/log_loop.py LOG` prints how many steps it finds: the peer of `latfit ingest LOG`.
"""

import re
import sys
from pathlib import Path
from typing import Any

PATTERN = (
    r"\((\w+) pid=\d+\)[^I]*INFO (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) \[[^\]]*\] (?:(Engine \d+): )?"
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: (\d+\.\d+) ms( \(dummy\))?(?:, GPU KV cache usage: (\d+\.\d+)%)?"
)
CLOCK = ("month", "day", "hour", "minute", "second")
COUNTS = ("step", "requests", "tokens", "decodes", "decoded")
NAMES = ("process", *CLOCK, "engine", *COUNTS, "ms", "dummy", "usage")
WHOLE = CLOCK + COUNTS


def read_re(path: Path) -> list[tuple[Any, ...]]:
    """A tuple of `NAMES` for each step."""
    found, rows = re.compile(PATTERN.encode()).search, []
    with path.open("rb") as stream:
        for line in stream:
            match = found(line)
            if match:
                process, month, day, hour, minute, second, engine, step, *counts, ms, dummy, usage = match.groups()
                rows.append(
                    (
                        process,
                        *map(int, (month, day, hour, minute, second)),
                        engine,
                        int(step),
                        *map(int, counts),
                        float(ms),
                        dummy is not None,
                        float(usage) if usage else float("nan"),
                    )
                )
    return rows


if __name__ == "__main__":
    print(len(read_re(Path(sys.argv[1]))))
