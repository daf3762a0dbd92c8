"""Which instructions the products of a step really ran on: evidence, not what was asked for.

A short run in a process of its own prints a line for every primitive that oneDNN executes (ONEDNN_VERBOSE=1, see its
developer guide, "Verbose Mode"); the fields are found by the template line that comes first:

    onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,...
    onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_amx,undef,src:bf16... ,0.1

Older versions leave out `v1` and `primitive`, or begin with `dnnl_verbose`. An implementation names its instruction set
behind the colon (`brgemm:avx512_core_bf16`, `brg_matmul:avx10_1_512_amx`); `gemm:jit` does not, and uses the widest
that the header line allows. OpenVINO names what it executed in its counters too (`brgemm_avx512_amx`).

The cap ONEDNN_MAX_CPU_ISA proves nothing: asked for AMX on a CPU without it, oneDNN runs AVX-512 and says nothing.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from latfit.profiling.host.isa import environment_for

PRODUCTS = ("matmul", "inner_product", "convolution", "gemm")
LONGEST_S = 120.0
ISA_RANK = ("sse4_1", "avx", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx")
EXEC_TYPES = "exec_types:"


@dataclass(frozen=True)
class Executed:
    """One primitive that oneDNN executed: `matmul`, `brg_matmul:avx512_core_bf16`."""

    primitive: str
    implementation: str


@dataclass(frozen=True)
class VerboseLog:
    """What a verbose log says: the widest instructions that oneDNN may use, and what it executed."""

    allowed: str | None
    executed: tuple[Executed, ...]

    @property
    def products(self) -> tuple[Executed, ...]:
        return tuple(run for run in self.executed if run.primitive in PRODUCTS)


def parse_verbose(text: str) -> VerboseLog:
    """The log in the output of a program that ran with ONEDNN_VERBOSE=1; other lines are passed over."""
    allowed, executed = None, []
    for line in text.splitlines():
        fields = line.strip().split(",")
        if fields[0] not in ("onednn_verbose", "dnnl_verbose"):
            continue
        if found := re.search(r",cpu,isa:(.*)", line):
            allowed = isa_of_header(found.group(1))
        if "exec" in fields[:5]:
            at = fields.index("exec")
            if len(fields) > at + 3 and fields[at + 1] == "cpu":
                executed.append(Executed(fields[at + 2], fields[at + 3]))
    return VerboseLog(allowed, tuple(executed))


def isa_of_implementation(name: str) -> str | None:
    """Instruction set in the name of a oneDNN implementation or an OpenVINO execution type; None where it has none."""
    lower = name.lower()
    if "amx" in lower:
        return "amx"
    if "avx512" in lower or "avx10_" in lower:
        wide = lower.partition("avx512")[2] or lower.partition("avx10_")[2]
        return next((f"avx512_{kind}" for kind in ("fp16", "bf16", "vnni") if kind in wide), "avx512")
    if "avx2" in lower:
        return "avx2_vnni" if "avx2_vnni" in lower else "avx2"
    return next((isa for isa in ("avx", "sse4_1") if isa in lower or isa.replace("_", "") in lower), None)


def isa_of_header(text: str) -> str | None:
    """The widest instruction set that the header line `cpu,isa:...` admits."""
    lower = text.lower()
    if "amx" in lower:
        return "amx"
    if "avx-512" in lower or "avx10" in lower:
        if re.search(r"\bfloat16", lower):
            return "avx512_fp16"
        return "avx512_bf16" if "bfloat16" in lower else "avx512_vnni" if "dl boost" in lower else "avx512"
    return "avx2" if "avx2" in lower else "avx" if "avx" in lower else "sse4_1" if "sse4.1" in lower else None


def evidence_of(text: str) -> dict[str, Any]:
    """Evidence in the output of a probe: `isa` of the widest products (None where no product names one), how often each
    implementation ran, and OpenVINO's execution types where it printed them."""
    log = parse_verbose(text)
    counts = Counter(f"{run.primitive},{run.implementation}" for run in log.products)
    types: list[str] = []
    for line in text.splitlines():
        if line.startswith(EXEC_TYPES):
            types = sorted(json.loads(line[len(EXEC_TYPES) :]))
    names = [run.implementation for run in log.products] or types
    found = [_isa(name, log.allowed) for name in names]
    known = [isa for isa in found if isa is not None]
    return {
        "isa": max(known, key=ISA_RANK.index) if known else None,
        "onednn_allows": log.allowed,
        "products": dict(counts.most_common()),
        **({"execution_types": types} if types else {}),
    }


def _isa(implementation: str, allowed: str | None) -> str | None:
    return allowed if "gemm:jit" in implementation else isa_of_implementation(implementation)


def satisfies(isa: str | None, asked: str) -> bool:
    """Whether products on `isa` are what `--isa asked` means."""
    same = {"avx512": ("avx512", "avx512_vnni"), "avx2": ("avx2", "avx2_vnni")}
    return asked == "auto" or isa in same.get(asked, (asked,))


def probe(device: str, precision: str, isa: str) -> dict[str, Any]:
    """Run a few small products of `device` in a process of its own and say what they ran on.

    `failed` in the answer holds the last line of a probe that ended in an error.
    """
    command = [sys.executable, "-P", "-m", "latfit.profiling.host.executed_isa", device, precision]
    environment = {**os.environ, **environment_for(isa, device), "ONEDNN_VERBOSE": "1", "OMP_NUM_THREADS": "1"}
    return run_probe(command, environment)


def run_probe(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        ended = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {"isa": None, "failed": f"no answer within {LONGEST_S:.0f} s"}
    found = evidence_of(ended.stdout)
    if ended.returncode:
        found["failed"] = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
    return found


def _run_products(device: str, precision: str) -> None:
    """What the probe's own process does: products of one layer, for one token and for 64."""
    from latfit.profiling.devices.protocol import DeviceSettings
    from latfit.profiling.shapes import ModelShape, StepShape

    shape = ModelShape("probe", 256, 1, 4, 2, 64, 512, 256)
    settings = DeviceSettings(precision, threads=1, part="gemm")
    opened: Any
    if device == "openvino":
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        opened = OpenVinoDevice(shape, settings, counted=True)
    else:
        from latfit.profiling.devices.torch_device import TorchCpuDevice

        opened = TorchCpuDevice(shape, settings)
    for cell in (StepShape(1, 16), StepShape(prefill=(64,))):
        opened.prepare(cell)
        opened.step_ms()
    if device == "openvino":
        print(EXEC_TYPES + json.dumps(opened.execution_types()))


if __name__ == "__main__":
    _run_products(*sys.argv[1:3])
