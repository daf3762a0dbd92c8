"""Fills the cache of compiled code as the first plan would, with --all also as the first engine simulation and large
fit; says so where there is anything to compile."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import latfit
from latfit.fitting.solver.compiled import box_step

measured = latfit.fit(Path(__file__).parent.parent / "sample_traces" / "cpu_numpy_tiny.parquet")
machine = {"cpu": measured, "gpu": "launch=2ms,slope=0.05ms,max_batch=64"}
latfit.plan(machine, sla="10ms", rate="3000/s")
if "--all" in sys.argv:
    latfit.simulate_engine(measured, "20/s", "32:8", kv_blocks=512)
    rng = np.random.default_rng(0)
    B = rng.integers(1, 65, 30_000)
    S = B + rng.integers(0, 2000, len(B))
    T_ms = (4 + 0.1 * B + 0.01 * S) * rng.lognormal(0, 0.05, len(B))
    latfit.fit(pd.DataFrame({"B": B, "S": S, "T_ms": T_ms}), model="saturation")
    latfit.fit(pd.DataFrame({"B": B, "S": B, "T_ms": T_ms}), model="linear")  # few cells of many rows
    box_step(np.ones(2), np.eye(2), -np.ones(2), np.ones(2))  # a model of many terms
