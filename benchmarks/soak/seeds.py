"""Small whole files of every format that latfit reads, for `mutants.py` to damage."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather, ipc

from latfit.cli.app import run
from latfit.trace import compress, write_trace

TRACE, STEPS, CELLS = "trace", "steps", "cells"
"""Measured steps: of any format; in columns B, S, T_ms; in Parquet, of which cells are made."""
REQUESTS, SERVED, CURVE = "requests", "served", "curve"
"""Recorded requests; those with the moments of their tokens; a rate over time."""
FIT, HARDWARE, PLAN, PLAN_OF_BATCHES, JOURNAL = "fit", "hardware", "plan", "batches", "journal"
GOOD_FIT, GOOD_TRACE, GOOD_PROFILE = "good.fit.json", "good.parquet", "good.json"


BESIDE = {
    "dense.csv": "layer,tokens,time_us\nlayernorm,1,2\nlayernorm,32,9\nembedding,1,5\nembedding,32,7\n",
    "per_sequence.csv": "layer,sequences,time_us\nlm_head,1,1000\nlm_head,2,1010\n",
    "meta.yaml": "hardware: RTX4090\nmodel: meta-llama/Llama-3.1-8B\n",
}
"""What has to lie beside `attention.csv`."""


@dataclass(frozen=True)
class Seed:
    """A whole file: its name, its content, and what kind of input it is."""

    name: str
    content: bytes
    kind: str


def _steps(rows: int = 48) -> pa.Table:
    """Steps with every column that commands look at."""
    rng = np.random.default_rng(0)
    B = rng.choice([1, 2, 4, 8, 16, 32], rows)
    prefill = np.where(rng.random(rows) < 0.3, rng.integers(1, 512, rows), 0)
    S = B + prefill
    T = (4 + 0.1 * B + 0.02 * S) * np.exp(rng.normal(0, 0.02, rows))
    return pa.table(
        {
            "B": pa.array(B.astype(np.int32)),
            "S": pa.array(S),
            "T_ms": T,
            "t_s": np.cumsum(T) / 1e3,
            "run": ["a"] * (rows // 2) + ["b"] * (rows - rows // 2),
            "phase": np.where(prefill > 0, "mixed", "decode").tolist(),
            "prefill_tokens": prefill,
            "prefill_requests": (prefill > 0).astype(np.int64),
            "context_tokens": (100 * B).astype(np.int64),
            "step": np.arange(rows),
            "warmup": np.zeros(rows, dtype=bool),
        }
    )


def _tables() -> dict[str, bytes]:
    """The same steps in every container."""
    table = _steps()
    table = table.replace_schema_metadata({"latfit": json.dumps({"schema": "latfit.trace/1", "provenance": {"a": 1}})})
    rows = table.to_pylist()
    sinks = {name: pa.BufferOutputStream() for name in ("t.parquet", "t.feather", "t.arrow", "t.stream")}
    pq.write_table(table, sinks["t.parquet"])
    feather.write_feather(table, sinks["t.feather"])
    with ipc.new_file(sinks["t.arrow"], table.schema) as writer:
        writer.write_table(table)
    with ipc.new_stream(sinks["t.stream"], table.schema) as writer:
        writer.write_table(table)
    found = {name: sink.getvalue().to_pybytes() for name, sink in sinks.items()}
    lines = [table.column_names, *([str(value) for value in row.values()] for row in rows)]
    comma = "\n".join(map(",".join, lines)) + "\n"
    return found | {
        "t.csv": comma.encode(),
        "t.tsv": comma.replace(",", "\t").encode(),
        "t16.csv": comma.encode("utf-16"),
        "t.csv.gz": gzip.compress(comma.encode(), mtime=0),
        "t.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "t.json": json.dumps(rows, indent=1).encode(),
        "other.csv": (
            "batch_size,num_tokens,latency_us\n" + "".join(f"{b},{b},{9e3 + b}\n" for b in range(1, 30))
        ).encode(),
    }


def log_lines(lines: int) -> Iterator[str]:
    """Log of three vLLM servers: names in colour, plain, and lines of the API server; two engines each."""
    rng = np.random.default_rng(0)
    for server in range(3):
        before, after = ("\x1b[0;36m", "\x1b[0;0m") if server == 0 else ("", "")
        names = [f"{before}(EngineCore_DP{rank} pid={2010410 + 100 * server + rank}){after}" for rank in range(2)]
        for name in names:
            yield f"{name} INFO 12-30 21:44:00 [core.py:97] Initializing a V1 LLM engine (v0.12.0) with config: m=1\n"
            yield f"{name} INFO 12-30 21:44:10 [kv_cache_utils.py:1286] GPU KV cache size: 1,234,567 tokens\n"
        for i in range(lines // 3):
            rank, other = i % 2, rng.random()
            prompt, decoding = int(rng.integers(1, 2048)) * (i % 10 == 0), int(rng.integers(1, 200))
            clock = f"12-30 21:45:{i // 40 % 60:02d}"
            step = (
                f"Iteration({i // 2}): {int(prompt > 0)} context requests, {prompt} context tokens, "
                f"{decoding} generation requests, {decoding} generation tokens, "
                f"iteration elapsed time: {rng.gamma(4, 6):.2f} ms"
            )
            if other < 0.02:
                yield f'(APIServer pid=77) INFO:     127.0.0.1:{40000 + i} - "POST /v1/completions HTTP/1.1" 200 OK\n'
            elif server < 2:
                yield f"{names[rank]} INFO {clock} [core.py:349] {step}\n"
            else:
                dummy = " (dummy)" if other < 0.05 else ""
                usage = f"{dummy}, GPU KV cache usage: {100 * rng.random():.1f}%"
                yield f"(APIServer pid=77) INFO {clock} [loggers.py:199] Engine {rank:03d}: {step}{usage}\n"


def _logs() -> dict[str, bytes]:
    """Logs and result files of engines."""
    stats = {
        "numContextRequests": 1,
        "numCtxKvTokens": 0,
        "numCtxTokens": 13,
        "numGenKvTokens": 64,
        "numGenRequests": 2,
    }
    trt = [
        {
            "inflightBatchingStats": stats | {"numCtxTokens": 13 + i, "avgNumDecodedTokensPerIter": 1.0},
            "iter": i,
            "iterLatencyMS": 52.0 + i,
            "kvCacheStats": {"maxNumBlocks": 5358, "tokensPerBlock": 32, "usedNumBlocks": 8 + i},
            "numQueuedRequests": 2,
            "timestamp": f"05-14-2026 02:51:{10 + i}.302341",
        }
        for i in range(12)
    ]
    done = {"num_prefill_requests": 2, "sum_prefill_tokens": 256, "num_decode_requests": 3, "sum_decode_kv_tokens": 9}
    fpm = [
        {
            "event": {
                "schema": "dynamo.fpm.trace.v1",
                "capture_mode": "full",
                "observed_at_unix_ms": 1782777601250 + 30 * i,
                "fpm": {
                    "worker_id": "4192",
                    "dp_rank": 0,
                    "counter_id": i,
                    "wall_time": 0.025,
                    "scheduled_requests": done | {"sum_prefill_kv_tokens": 64 + i},
                    "queued_requests": {"num_prefill_requests": 1, "num_decode_requests": 0},
                },
            }
        }
        for i in range(12)
    ]
    sglang = [
        {
            "run_name": "default",
            "batch_size": b,
            "input_len": 256,
            "output_len": 32,
            "prefill_latency": 0.123 * b,
            "median_decode_latency": 0.0045,
        }
        for b in (1, 2, 4, 8)
    ]
    flat = "wall_time_s,prefill_tokens,prefill_requests,decode_requests,prefill_kv_tokens,decode_kv_tokens\n"
    split = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
    split += "".join(
        f"llama2-70b,a100,{p},{b},128,{20 + p * b / 9},{30 + b},4\n" for p in (128, 512) for b in (1, 2, 4)
    )
    names = [f"time_stats.{one}.median" for one in ("emb", "attn_pre_proj", "mlp_down_proj", "add")]
    vidur = ",".join([*names, "n_layer,num_tokens"]) + "\n"
    vidur += "".join(f"0.2,1.9,{1 + s / 99},0.05,32,{s}\n" for s in (1, 8, 64, 512))
    return {
        "server.log": "".join(log_lines(120)).encode(),
        "server.log.gz": gzip.compress("".join(log_lines(60)).encode(), mtime=0),
        "trt.jsonl": "".join(json.dumps(each) + "\n" for each in trt).encode(),
        "trt.json": json.dumps(trt).encode(),
        "fpm.jsonl": "".join(json.dumps(each) + "\n" for each in fpm).encode(),
        "sglang.jsonl": "".join(json.dumps(each) + "\n" for each in sglang).encode(),
        "flat.csv": (flat + "".join(f"0.0{20 + i},{64 * i},1,{i},0,{9 * i}\n" for i in range(12))).encode(),
        "splitwise.csv": split.encode(),
        "mlp.csv": vidur.encode(),
        "attention.csv": b"prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
        b"0,0,1,16,10\n1,64,1,32,30\n16,0,1,16,90\n",
    }


def _requests() -> dict[str, bytes]:
    """Recorded requests of every tool, served in the time of the steps of `_steps`."""
    n = 30
    starts, prompts, outputs = (
        [100 + 0.2 * i for i in range(n)],
        [40 + i for i in range(n)],
        [3 + i % 5 for i in range(n)],
    )
    step_s = 4.12e-3  # of one request that decodes
    firsts = [4.1e-3 + 2e-5 * p for p in prompts]
    lasts = [first + step_s * (o - 1) for first, o in zip(firsts, outputs, strict=True)]
    rows = list(zip(starts, prompts, outputs, firsts, lasts, strict=True))
    moments = "t_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"
    bench = {
        "date": "20260101-000000",
        "start_times": starts,
        "input_lens": prompts,
        "output_lens": outputs,
        "ttfts": firsts,
        "itls": [[step_s] * (o - 1) for o in outputs],
        "errors": [""] * n,
    }
    served = [
        {
            "request_start_time": s,
            "prompt_tokens": p,
            "output_tokens": o,
            "time_to_first_token_ms": 1e3 * first,
            "request_latency": last,
        }
        for s, p, o, first, last in rows
    ]
    benchmarks = [{"type_": "generative_benchmark", "requests": {"successful": served}}]
    aiperf = "".join(
        json.dumps(
            {
                "metadata": {"request_start_ns": int(s * 1e9), "benchmark_phase": "profiling"},
                "metrics": {
                    "input_sequence_length": {"value": p},
                    "output_sequence_length": {"value": o},
                    "time_to_first_token": {"value": 1e3 * first},
                    "request_latency": {"value": 1e3 * last},
                },
                "error": None,
            }
        )
        + "\n"
        for s, p, o, first, last in rows
    )
    return {
        "measured.csv": (
            moments + "".join(f"{s},{p},{o},{s + first},{s + last}\n" for s, p, o, first, last in rows)
        ).encode(),
        "azure.csv": (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            + "".join(f"2023-11-16 18:15:{10 + i}.5,{p},{o}\n" for i, (_, p, o, *_) in enumerate(rows))
        ).encode(),
        "mooncake.jsonl": "".join(
            json.dumps({"timestamp": 200 * i, "input_length": p, "output_length": o}) + "\n"
            for i, (_, p, o, *_) in enumerate(rows)
        ).encode(),
        "bench.json": json.dumps(bench).encode(),
        "guidellm.json": json.dumps(
            {"metadata": {"guidellm_version": "0.6.0"}, "benchmarks": benchmarks}, indent=1
        ).encode(),
        "aiperf.jsonl": aiperf.encode(),
    }


def _journal() -> bytes:
    """The journal of a profile that was cut off."""
    from dataclasses import asdict

    from latfit.profiling.grid import ProfileRequest
    from latfit.profiling.journal import SCHEMA

    lines = [
        {"schema": SCHEMA, "asked": asdict(ProfileRequest(grid="B=1,2;S=1,4")), "started": "2026", "process": 1},
        {
            "path": 0,
            "cells": [[1, 0, [], []], [2, 0, [], []]],
            "limits": [[[64, 0, [], []], "memory", "no"]],
            "grid": {},
        },
        {"path": 0, "samples": [[0, 0, 1.5, 0.0, False, 0]], "too_large": [[1, "no"]], "elapsed_s": 1.0},
    ]
    return "".join(json.dumps(line, default=list) + "\n" for line in lines).encode()


def run_quietly(arguments: Sequence[str]) -> None:
    """Run a command. Raises RuntimeError unless it ends with exit code 0."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        code = run(arguments)
    if code:
        raise RuntimeError(f"latfit {' '.join(arguments)} exits with {code}: {said.getvalue()}")


def make_seeds() -> list[Seed]:
    """All of them; writes a good trace, its fit, its cells, a hardware profile and plans into the working folder."""
    pq.write_table(_steps(400), GOOD_TRACE)
    for name, content in BESIDE.items():
        Path(name).write_text(content)
    run_quietly(["fit", GOOD_TRACE, "--model", "saturation", "--quiet", "--out", GOOD_FIT, "--path", "cpu", "--force"])
    write_trace(Path("cells.parquet"), compress(GOOD_TRACE))
    nominal = ["hardware", "add", "gpu", "--nominal", "launch=8ms,slope=1ms,per_token=0.01ms,max_batch=32", "--quiet"]
    for profile in ("hardware.json", GOOD_PROFILE):
        run_quietly([*nominal, "--hardware", profile])
    limits = ["--lengths", "30:5", "--ttft", "500ms", "--replicas", "1"]
    run_quietly(["plan", "--rate", "20/s", *limits, "--hardware", GOOD_PROFILE, "--out", "requests.json", "--quiet"])
    run_quietly(["plan", "--sla", "40ms", "--hardware", GOOD_PROFILE, "--out", "batches.json", "--quiet"])
    kinds = {"t.parquet": CELLS, "other.csv": TRACE, "azure.csv": REQUESTS, "mooncake.jsonl": REQUESTS}
    seeds = [Seed(name, content, kinds.get(name, STEPS)) for name, content in _tables().items()]
    seeds += [Seed(name, content, TRACE) for name, content in _logs().items()]
    seeds += [Seed(name, content, kinds.get(name, SERVED)) for name, content in _requests().items()]
    seeds.append(Seed("curve.csv", b"t_s,rate_per_s\n0,100\n10,400\n20,50\n", CURVE))
    fit = json.loads(Path(GOOD_FIT).read_text())
    fit["draws"]["values"] = fit["draws"]["values"][:4]  # else most of what is damaged would be in them
    # the richest formats are damaged more often
    seeds += 3 * [Seed("a.fit.json", json.dumps(fit, indent=1).encode(), FIT)]
    seeds += 2 * [Seed("hw.json", Path("hardware.json").read_bytes(), HARDWARE)]
    seeds += 2 * [Seed("plan.json", Path("requests.json").read_bytes(), PLAN)]
    seeds.append(Seed("batches.json", Path("batches.json").read_bytes(), PLAN_OF_BATCHES))
    seeds.append(Seed("cells.parquet", Path("cells.parquet").read_bytes(), CELLS))
    return [*seeds, Seed("p.journal", _journal(), JOURNAL)]
