"""A closed loop with a real vLLM: record a load, fit, simulate other loads, compare."""

from benchmarks.engine_loop.loop import main as main
