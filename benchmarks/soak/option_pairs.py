"""Every two options of a verb, each with an effect beside the other or refused: what `tests/cli/test_option_pairs.py`
does with the options of one panel.

    python -m benchmarks.soak.option_pairs
"""

import sys
import tempfile
from pathlib import Path

from tests.cli.option_values import BASE
from tests.cli.test_option_pairs import NOT_RUN, Trials, all_pairs, idle_alone, idle_in_pairs


def main() -> None:
    """Print what does nothing, and exit with 1 where there is such."""
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for verb in sys.argv[1:] or [verb for verb in BASE if verb not in NOT_RUN]:
            before = len(trials.known)
            found = [*idle_alone(trials, verb), *idle_in_pairs(trials, verb, all_pairs(verb))]
            count += len(found)
            print(f"{verb}: {len(trials.known) - before:,} command lines, {len(found)} without effect", flush=True)
            for line in found:
                print(f"    {line}", flush=True)
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
