"""`python -m benchmarks [--smoke]`: every benchmark; --smoke runs each once and small, to see that it runs."""

import sys

from benchmarks import (
    accuracy,
    coverage,
    engine_loop,
    engine_speed,
    exports,
    first_answer,
    fit_speed,
    fit_time,
    front_overhead,
    gate,
    learning,
    ledger,
    loads,
    optimum,
    parse_speed,
    peer_simulators,
    plan_edges,
    plan_search,
    planted,
    profile_design,
    promises,
    record_overhead,
    router_overhead,
    sim_speed,
    simulated_intervals,
    start_up,
    tune_sweep,
    validated,
)

if __name__ == "__main__":
    smoke = "--smoke" in sys.argv[1:]
    start_up.main(smoke)
    first_answer.main(smoke)
    planted.main(smoke)
    gate.main(smoke)
    fit_time.main(smoke)
    record_overhead.main(smoke)
    front_overhead.main(smoke)
    router_overhead.main(smoke)
    learning.main(smoke)
    ledger.main(smoke)
    profile_design.main(smoke)
    parse_speed.main(smoke)
    coverage.main(smoke)
    fit_speed.main(smoke)
    optimum.main(smoke)
    engine_speed.main(smoke)
    peer_simulators.main(smoke)
    sim_speed.main(smoke)
    plan_search.main(smoke)
    plan_edges.main(smoke)
    promises.main(smoke)
    accuracy.main(smoke)
    loads.main(smoke)
    simulated_intervals.main(smoke)
    exports.main(smoke)
    tune_sweep.main(smoke)
    validated.main(smoke)
    engine_loop.main(smoke)
