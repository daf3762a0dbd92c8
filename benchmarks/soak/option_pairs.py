"""Every option and every two options of a verb: each has an effect or is refused.

`tests/cli/test_option_pairs.py` tries a sample of these.

    python -m benchmarks.soak.option_pairs
"""

import sys
import tempfile
from pathlib import Path

from tests.cli.option_values import BASE
from tests.cli.test_option_pairs import NOT_RUN, Trials, all_pairs, idle_alone, idle_in_pair, tried_options


def main() -> None:
    """Print what does nothing, and exit with 1 where there is such."""
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for verb in sys.argv[1:] or [verb for verb in BASE if verb not in NOT_RUN]:
            before = len(trials.known)
            found = [line for option in tried_options(verb) for line in idle_alone(trials, verb, option)]
            found += [line for pair in all_pairs(verb) for line in idle_in_pair(trials, verb, pair)]
            count += len(found)
            print(f"{verb}: {len(trials.known) - before:,} command lines, {len(found)} without effect", flush=True)
            for line in found:
                print(f"    {line}", flush=True)
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
