"""The profiler: what a step computes (workload), who executes it (devices), which steps (design), and the run itself.

`profiler.measure.measure` does all of it. This file imports nothing, so that `isa` can be asked before NumPy is loaded.
"""
