"""`python -m benchmarks [--smoke]`: every benchmark; --smoke runs each once and small, to see that it runs."""

import sys
from importlib import import_module

NAMES = (
    "start_up",
    "first_answer",
    "planted",
    "gate",
    "record_overhead",
    "front_overhead",
    "router_overhead",
    "learning",
    "ledger",
    "coverage",
    "fit_speed",
    "engine_speed",
    "peer_simulators",
    "sim_speed",
    "plan_search",
    "promises",
    "accuracy",
    "loads",
    "simulated_intervals",
    "tune_sweep",
    "validated",
    "engine_loop",
)

if __name__ == "__main__":
    for name in NAMES:
        import_module(f"benchmarks.{name}").main("--smoke" in sys.argv[1:])
