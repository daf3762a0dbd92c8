"""The profiler: what a step computes (workload, models), who executes it (devices), which cells (design, adaptive), and
the run itself (visits, runner, journal).

`profiler.measure.measure` does all of it; `opening` finds the devices that a machine has, `dispatch` proves what ran.
"""
