"""Which instructions the products of a step really ran on: evidence, not what was asked for.

A short run in a process of its own prints a line for every primitive that oneDNN executes (ONEDNN_VERBOSE=1; see its
developer guide, "Verbose Mode"):

    onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_amx,undef,src:bf16... ,0.1

OpenVINO names what it executed in its counters too (`brgemm_avx512_amx`). The cap ONEDNN_MAX_CPU_ISA proves nothing:
asked for AMX on a CPU without it, oneDNN runs AVX-512 and does not say so.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from latfit.profiling.host.isa import environment_for

PRODUCTS = ("matmul", "inner_product", "convolution", "gemm")
PROBE_TIMEOUT_S = 120.0
ISA_RANK = ("sse4_1", "avx", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx")
EXEC_TYPES = "exec_types:"

# What names an instruction set, the widest first: in a kernel's name (`brg_matmul:avx10_1_512_amx`), and in oneDNN's
# header line (`isa:Intel AVX-512 with Intel DL Boost`). All must match.
_IN_KERNELS = (
    ("amx", "amx"),
    ("avx512_fp16", "avx(512|10_).*fp16"),
    ("avx512_bf16", "avx(512|10_).*bf16"),
    ("avx512_vnni", "avx(512|10_).*vnni"),
    ("avx512", "avx(512|10_)"),
    ("avx2_vnni", "avx2_vnni"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_1", "sse4_?1"),
)
_IN_HEADERS = (
    ("amx", "amx"),
    ("avx512_fp16", r"avx(-512|10).*\bfloat16"),
    ("avx512_bf16", "avx(-512|10).*bfloat16"),
    ("avx512_vnni", "avx(-512|10).*dl boost"),
    ("avx512", "avx(-512|10)"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_1", r"sse4\.1"),
)


def isa_of_kernel(name: str) -> str | None:
    """Return the instruction set that a oneDNN or OpenVINO kernel name holds, if any."""
    return next((isa for isa, pattern in _IN_KERNELS if re.search(pattern, name.lower())), None)


def isa_of_header(text: str) -> str | None:
    """Return the widest instruction set that oneDNN's header line `cpu,isa:...` admits."""
    return next((isa for isa, pattern in _IN_HEADERS if re.search(pattern, text.lower())), None)


def evidence_of(text: str) -> dict[str, Any]:
    """Read the output of a probe.

    Returns
    -------
    `isa` of the widest products (None if no product names one), `onednn_allows`, how often each implementation ran
    (`products`), and OpenVINO's `execution_types` if it printed them. `gemm:jit` names no instruction set and uses the
    widest that is allowed.
    """
    allowed: str | None = None
    counts: Counter[str] = Counter()
    types: list[str] = []
    for line in text.splitlines():
        fields = line.strip().split(",")
        if line.startswith(EXEC_TYPES):
            types = sorted(json.loads(line[len(EXEC_TYPES) :]))
        if fields[0] not in ("onednn_verbose", "dnnl_verbose"):
            continue
        if found := re.search(r",cpu,isa:(.*)", line):
            allowed = isa_of_header(found[1])
        ran = re.search(r",exec,cpu,([^,]+),([^,]+),", line)
        if ran and ran[1] in PRODUCTS:
            counts[f"{ran[1]},{ran[2]}"] += 1
    names = [key.partition(",")[2] for key in counts] or types
    known = [isa for name in names if (isa := allowed if "gemm:jit" in name else isa_of_kernel(name))]
    return {
        "isa": max(known, key=ISA_RANK.index) if known else None,
        "onednn_allows": allowed,
        "products": dict(counts.most_common()),
        **({"execution_types": types} if types else {}),
    }


def satisfies(isa: str | None, asked: str) -> bool:
    """Whether products on `isa` are what `--isa asked` means."""
    same = {"avx512": ("avx512", "avx512_vnni"), "avx2": ("avx2", "avx2_vnni")}
    return asked == "auto" or isa in same.get(asked, (asked,))


def probe(device: str, precision: str, isa: str) -> dict[str, Any]:
    """Run a few small products of `device` in a process of its own and return the evidence of what they ran on;
    `failed` holds the last line of a probe that ended in an error."""
    command = [sys.executable, "-P", "-m", "latfit.profiling.host.executed_isa", device, precision]
    environment = {**os.environ, **environment_for(isa, device), "ONEDNN_VERBOSE": "1", "OMP_NUM_THREADS": "1"}
    return run_probe(command, environment)


def run_probe(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        ended = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"isa": None, "failed": f"no answer within {PROBE_TIMEOUT_S:.0f} s"}
    found = evidence_of(ended.stdout)
    if ended.returncode:
        found["failed"] = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
    return found


def _run_products(device: str, precision: str) -> None:
    """What the probe's own process does: products of one layer, for one token and for 64."""
    from latfit.profiling.devices.device import DeviceSettings
    from latfit.profiling.shapes import ModelShape, StepShape

    shape = ModelShape("probe", 256, 1, 4, 2, 64, 512, 256)
    settings = DeviceSettings(precision, threads=1, part="gemm")
    opened: Any
    if device == "openvino":
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        opened = OpenVinoDevice(shape, settings, counted=True)
    else:
        from latfit.profiling.devices.torch_device import CpuRuntime, TorchDevice

        opened = TorchDevice(shape, settings, CpuRuntime())
    for cell in (StepShape(1, 16), StepShape(prefill=(64,))):
        opened.prepare(cell)
        opened.step_ms()
    if device == "openvino":
        print(EXEC_TYPES + json.dumps(opened.execution_types()))


if __name__ == "__main__":
    _run_products(*sys.argv[1:3])
