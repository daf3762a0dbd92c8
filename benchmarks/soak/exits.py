"""Short runs that read Parquet and end at once, beside busy processes: every one ends with exit code 0.

`python -m benchmarks.soak.exits --n 500`. Parquet read through a Python file object is read by threads of Arrow's that
may still hold it while the interpreter ends; where these found no time before, the process was aborted at its end
("terminate called without an active exception", signal 6).
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from latfit.trace import Trace, write_trace

BUSY = 2
SAID_EVERY = 100
RUN = "import sys; from pathlib import Path; from latfit.trace.parquet import read_parquet as read\n" + (
    "read(Path(sys.argv[1]))\n" * 2
)


def main(n: int) -> int:
    """Number of runs that did not end well; the count of each outcome is printed."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        file = Path(place) / "steps.parquet"
        B = np.arange(1.0, 2001.0)
        write_trace(file, Trace({"B": B, "S": 4 * B, "T_ms": 5 + 0.1 * B}))
        for _ in range(BUSY):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        for i in range(n):
            if i and i % SAID_EVERY == 0:
                print(f"{i} of {n} runs: {_told(outcomes)}", flush=True)
            ended = subprocess.run([sys.executable, "-c", RUN, str(file)], stderr=subprocess.PIPE)
            code, said = ended.returncode, ended.stderr.decode(errors="replace").strip()
            kind = f"signal {-code}" if code < 0 else f"exit {code}"
            outcomes[kind if not said else f"{kind} with words on stderr"] += 1
            if said:
                print(f"{kind}: {said[-300:]}", flush=True)
    print(f"{n} runs beside {BUSY} busy processes: {_told(outcomes)}.")
    return n - outcomes["exit 0"]


def _told(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="runs")
    sys.exit(main(parser.parse_args().n) > 0)
