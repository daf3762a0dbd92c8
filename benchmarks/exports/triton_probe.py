"""Run by an interpreter that has nvidia-pytriton: starts the Triton server that the package carries on a repository,
sends it requests as a Poisson stream, and prints what it made of them as one JSON object.

    python triton_probe.py REPOSITORY MODEL RATE_PER_S SECONDS SEED
    python triton_probe.py serve REPOSITORY [GRPC HTTP]

MODEL: `router.py` sends through the exported router. serve: on these ports or any, prints the server's process and its
addresses of gRPC and HTTP when it is ready, and ends it when stdin does. Only loopback is listened on.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WARM_S, START_S = 3.0, 60.0


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def started(repository: Path, folder: Path, grpc: int = 0, http: int = 0) -> tuple[subprocess.Popen[bytes], str, str]:
    """The server, and the addresses of its gRPC and HTTP. grpc, http: their ports, 0 for any."""
    import pytriton

    home = Path(pytriton.__file__).parent
    shutil.copytree(home / "tritonserver" / "backends", folder / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "backends" / "python" / "triton_python_backend_stub"
    shutil.copy(home / "tritonserver" / "python_backend_stubs" / version / stub.name, stub)
    stub.chmod(0o755)
    grpc, http = grpc or free_port(), http or free_port()
    libraries = [str(home.parent / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
    memory = {
        "shm-region-prefix-name": f"latfit-{os.getpid()}",
        "shm-default-byte-size": 4 << 20,
        "shm-growth-byte-size": 1 << 20,
    }
    command = [
        str(home / "tritonserver" / "bin" / "tritonserver"), f"--model-repository={repository}",
        f"--backend-directory={folder / 'backends'}", "--grpc-address=127.0.0.1", f"--grpc-port={grpc}",
        "--http-address=127.0.0.1", f"--http-port={http}", "--allow-metrics=false",
        *(f"--backend-config=python,{name}={value}" for name, value in memory.items()),
    ]  # fmt: skip
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    log = (folder / "server.log").open("wb")
    return subprocess.Popen(command, env=env, stdout=log, stderr=log), f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}"


async def driven(address: str, repository: Path, model: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Response times in ms and sizes of the steps that requests were in."""
    import tritonclient.grpc.aio as aio
    from tritonclient.grpc import InferInput

    client = aio.InferenceServerClient(address)
    await ready(client)
    row = np.zeros((1, 1), np.float32)
    if model == "router.py":
        spec = importlib.util.spec_from_file_location("router", repository.parent / "router.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        router = module.Router(client)

        async def send() -> int:
            return int((await router.infer({"INPUT": row}))["BATCH"][0, 0])
    else:

        async def send() -> int:
            tensor = InferInput("INPUT", [1, 1], "FP32")
            tensor.set_data_from_numpy(row)
            return int((await client.infer(model, [tensor])).as_numpy("BATCH")[0, 0])

    await asyncio.gather(*(send() for _ in range(20)))
    before = await counts(client)
    rng = np.random.default_rng(seed)
    moments = np.cumsum(rng.exponential(1 / rate, int(rate * (seconds + WARM_S))))
    begun = time.perf_counter()

    async def at(moment: float) -> tuple[float, float, int]:
        batch = await send()
        return moment, (time.perf_counter() - begun - moment) * 1e3, batch

    tasks = []
    for moment in moments.tolist():
        await asyncio.sleep(max(begun + moment - time.perf_counter(), 0.0))
        tasks.append(asyncio.ensure_future(at(moment)))
    found = [(took, batch) for moment, took, batch in await asyncio.gather(*tasks) if moment > WARM_S]
    after = await counts(client)
    await client.close()
    took = np.array([each for each, _ in found])
    return {
        "requests": len(found),
        "rate_per_s": len(found) / float(moments[-1] - WARM_S),
        **{f"p{p}_ms": float(np.percentile(took, p)) for p in (50, 90, 99)},
        "mean_ms": float(took.mean()),
        "models": {name: difference(before[name], after[name]) for name in after},
    }


async def ready(client: Any) -> None:
    begun = time.perf_counter()
    while time.perf_counter() - begun < START_S:
        try:
            if await client.is_server_ready():
                return
        except Exception:  # noqa: BLE001  not listening yet
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server does not start")


async def counts(client: Any) -> dict[str, dict[str, Any]]:
    """What Triton counted, by model: steps by their size, requests and the ns that they waited."""
    stats = await client.get_inference_statistics(as_json=True)
    return {
        each["name"]: {
            "steps": {
                int(row["batch_size"]): int(row["compute_infer"]["count"]) for row in each.get("batch_stats", [])
            },
            "took_ns": {
                int(row["batch_size"]): int(row["compute_infer"].get("ns", 0)) for row in each.get("batch_stats", ())
            },
            "queue_ns": int(each["inference_stats"]["queue"].get("ns", 0)),
            "requests": int(each["inference_stats"]["queue"].get("count", 0)),
        }
        for each in stats["model_stats"]
    }


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    steps = {size: count - before["steps"].get(size, 0) for size, count in after["steps"].items()}
    took = {
        size: (ns - before["took_ns"].get(size, 0)) / 1e6 / steps[size]
        for size, ns in after["took_ns"].items()
        if steps[size]
    }
    requests = after["requests"] - before["requests"]
    queue_ms = (after["queue_ns"] - before["queue_ns"]) / 1e6 / max(requests, 1)
    return {
        "steps": {size: n for size, n in steps.items() if n},
        "took_ms": took,
        "requests": requests,
        "mean_queue_ms": queue_ms,
    }


def serve(repository: str, grpc: str = "0", http: str = "0") -> None:
    import tritonclient.grpc.aio as aio

    async def until_ready(address: str) -> None:
        client = aio.InferenceServerClient(address)
        await ready(client)
        await client.close()

    with tempfile.TemporaryDirectory() as scratch:
        server, address, web = started(Path(repository), Path(scratch), int(grpc), int(http))
        try:
            asyncio.run(until_ready(address))
            print(server.pid, address, web, flush=True)
            sys.stdin.read()
        finally:
            server.terminate()
            server.wait(timeout=30)


def main() -> None:
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
        return
    repository, model, rate, seconds, seed = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        server, address, _ = started(Path(repository), Path(scratch))
        try:
            found = asyncio.run(driven(address, Path(repository), model, float(rate), float(seconds), int(seed)))
        except BaseException:
            print((Path(scratch) / "server.log").read_text(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait(timeout=30)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
