"""A front on a bad day: engines that fail in every way, callers who leave; real connections on this machine.

`python -m benchmarks.soak.front --n 20000 [--seed 0]`. Prints how requests ended, and ends with an error where one got
no answer, or another one's, where a task or a body was left, or where memory grew.
"""

import argparse
import resource

from tests.unit.live.front.bad_day import bad_day

STRETCH = 2000
"""Requests before one front."""

GROWTH_MIB = 50.0


def used_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    ended = bad_day(min(STRETCH, given.n), given.seed)
    began = used_mib()
    for number, done in enumerate(range(STRETCH, given.n, STRETCH), 1):
        ended += bad_day(min(STRETCH, given.n - done), given.seed + number)
    told = ", ".join(f"{kind} {count:,}" for kind, count in sorted(ended.items()))
    print(
        f"front: {sum(ended.values()):,} requests, each one answer: {told}; memory grew by {used_mib() - began:.0f} MiB"
    )
    if used_mib() - began > GROWTH_MIB:
        raise SystemExit("memory grew")


if __name__ == "__main__":
    main()
