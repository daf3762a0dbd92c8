"""`python -m benchmarks [--smoke]`: every benchmark; --smoke runs each once and small, to see that it runs."""

import sys

from benchmarks import coverage, fit_speed, fit_time, parse_speed, record_overhead, scale, start_up

if __name__ == "__main__":
    smoke = "--smoke" in sys.argv[1:]
    start_up.main(smoke)
    fit_time.main(smoke)
    record_overhead.main(smoke)
    scale.main(smoke)
    parse_speed.main(smoke)
    coverage.main(smoke)
    fit_speed.main(smoke)
