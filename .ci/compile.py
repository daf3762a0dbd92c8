"""Fills the cache of compiled code as the first plan would, with --all also as the first engine simulations
would: with and without shared prefixes, one replica and several, static batches. Says so where there is
anything to compile."""

import json
import sys
import tempfile
from pathlib import Path

import latfit

measured = latfit.fit(Path(__file__).parent.parent / "sample_traces" / "cpu_numpy_tiny.parquet")
machine = {"cpu": measured, "gpu": "launch=2ms,slope=0.05ms,max_batch=64"}
latfit.plan(machine, sla="10ms", rate="3000/s")
if "--all" in sys.argv:
    latfit.simulate_engine(measured, "20/s", "32:8", kv_blocks=512)
    latfit.simulate_engine(measured, "20/s", "32:8", kv_blocks=512, batching="static")
    latfit.simulate_engine(measured, "20/s", "32:8", kv_blocks=512, replicas=2, route="least-loaded")
    with tempfile.TemporaryDirectory() as folder:
        request = {"input_length": 1024, "output_length": 8}  # of two blocks of 512 tokens
        rows = [{**request, "timestamp": 50 * i, "hash_ids": [i % 3, 3 + i]} for i in range(40)]
        arrivals = Path(folder) / "prefixes.jsonl"
        arrivals.write_text("\n".join(map(json.dumps, rows)))
        latfit.simulate_engine(measured, arrivals=arrivals, kv_blocks=512)
        latfit.simulate_engine(measured, arrivals=arrivals, kv_blocks=512, replicas=2, route="prefix")
