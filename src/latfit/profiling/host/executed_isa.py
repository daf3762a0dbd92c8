"""Find the instructions that products really ran on.

A short run in a child process prints a line for every primitive of oneDNN (ONEDNN_VERBOSE=1):

    onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_amx,undef,src:bf16... ,0.1

OpenVINO names them in its counters too. The cap ONEDNN_MAX_CPU_ISA proves nothing.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

from latfit.profiling.host.isa import environment_for

PRODUCTS = ("matmul", "inner_product", "convolution", "gemm")
PROBE_TIMEOUT_S = 120.0
EXEC_TYPES = "exec_types:"

# What names an instruction set, the widest first: in a kernel's name (`brg_matmul:avx10_1_512_amx`), or in oneDNN's
# header line (`isa:Intel AVX-512 with Intel DL Boost`). All must match.
_ISA_PATTERNS = (
    ("amx", "amx"),
    ("avx512_fp16", r"avx(-?512|10).*(fp16|\bfloat16)"),
    ("avx512_bf16", "avx(-?512|10).*(bf16|bfloat16)"),
    ("avx512_vnni", "avx(-?512|10).*(vnni|dl boost)"),
    ("avx512", "avx(-?512|10)"),
    ("avx2_vnni", "avx2_vnni"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_1", r"sse4[._]?1"),
)
ISA_RANK = tuple(isa for isa, _ in reversed(_ISA_PATTERNS))


def isa_in(text: str) -> str | None:
    return next((isa for isa, pattern in _ISA_PATTERNS if re.search(pattern, text.lower())), None)


def evidence_of(text: str) -> dict[str, Any]:
    """Return what a probe's output proves. `gemm:jit` uses the widest instruction set that is allowed."""
    allowed: str | None = None
    counts: Counter[str] = Counter()
    types: list[str] = []
    for line in text.splitlines():
        if line.startswith(EXEC_TYPES):
            types = sorted(json.loads(line[len(EXEC_TYPES) :]))
        if found := re.search(r",cpu,isa:(.*)", line):
            allowed = isa_in(found[1])
        ran = re.search(r",exec,cpu,([^,]+),([^,]+),", line)
        if ran and ran[1] in PRODUCTS:
            counts[f"{ran[1]},{ran[2]}"] += 1
    names = [key.partition(",")[2] for key in counts] or types
    known = [isa for name in names if (isa := allowed if "gemm:jit" in name else isa_in(name))]
    return {
        "isa": max(known, key=ISA_RANK.index) if known else None,
        "onednn_allows": allowed,
        "products": dict(counts.most_common()),
        **({"execution_types": types} if types else {}),
    }


def satisfies(isa: str | None, asked: str) -> bool:
    same = {"avx512": ("avx512", "avx512_vnni"), "avx2": ("avx2", "avx2_vnni")}
    return asked == "auto" or isa in same.get(asked, (asked,))


def probe(device: str, precision: str, isa: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "latfit.profiling.host.executed_isa", device, precision]
    environment = {**os.environ, **environment_for(isa, device), "ONEDNN_VERBOSE": "1", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"isa": None, "failed": f"no answer within {PROBE_TIMEOUT_S:.0f} s"}
    found = evidence_of(ended.stdout)
    if ended.returncode:
        found["failed"] = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
    return found


def _run_products(device: str, precision: str) -> None:
    from latfit.profiling.devices.device import DeviceSettings
    from latfit.profiling.shapes import ModelShape, StepShape

    shape = ModelShape("probe", 256, 1, 4, 2, 64, 512, 256)
    settings = DeviceSettings(precision, threads=1, part="gemm")
    opened: Any
    if device == "openvino":
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        opened = OpenVinoDevice(shape, settings, counted=True)
    else:
        from latfit.profiling.devices.torch_device import TorchDevice

        opened = TorchDevice(shape, settings)
    for cell in (StepShape(1, 16), StepShape(prefill=(64,))):
        opened.prepare(cell)
        opened.step_ms()
    if device == "openvino":
        print(EXEC_TYPES + json.dumps(opened.execution_types()))


if __name__ == "__main__":
    _run_products(*sys.argv[1:3])
