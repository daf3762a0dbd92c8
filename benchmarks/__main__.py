"""`python -m benchmarks [--smoke]`: every benchmark; --smoke runs each once and small, to see that it runs."""

import sys

from benchmarks import fit_time, record_overhead, start_up

if __name__ == "__main__":
    smoke = "--smoke" in sys.argv[1:]
    start_up.main(smoke)
    fit_time.main(smoke)
    record_overhead.main(smoke)
