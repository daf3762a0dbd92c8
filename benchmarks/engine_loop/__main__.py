"""`python -m benchmarks.engine_loop`."""

import sys

from benchmarks.engine_loop.loop import main

if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--smoke"])
