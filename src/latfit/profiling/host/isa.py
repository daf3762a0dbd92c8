"""Instruction sets: what the CPU has, what a BLAS kernel set runs, and how to cap a library.

A cap is an environment variable, since libraries choose their kernels while they load. CPU flags do not prove AMX, for
which Linux must grant tile registers; see `executed_isa`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from latfit.errors import HardwareMissing, WrongUsage

CHOICES = ("auto", "amx", "avx512_bf16", "avx512", "avx2")

# What float32 products run on under each of OpenBLAS's kernel sets. Cooperlake and SapphireRapids add bfloat16 kernels,
# which NumPy never calls.
_CORES = {
    "avx512": "sapphirerapids cooperlake skylakex",
    "avx2": "haswell zen excavator",
    "avx": "sandybridge bulldozer piledriver steamroller",
    "sse4_2": "nehalem",
    "sse3": "prescott",
    "neon": "armv8 neoversen1 neoversen2 vortex",
    "sve": "neoversev1 armv8sve",
}
ISA_OF_CORE: Mapping[str, str] = {core: isa for isa, cores in _CORES.items() for core in cores.split()}

_CORE_FOR: Mapping[str, str] = {"avx512": "SkylakeX", "avx2": "Haswell"}
_ONEDNN_CAP: Mapping[str, str] = {
    "amx": "AVX512_CORE_AMX",
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512": "AVX512_CORE_VNNI",
    "avx2": "AVX2",
}
FLAGS_FOR: Mapping[str, tuple[str, ...]] = {
    "amx": ("amx_tile", "amx_bf16"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
    "avx2": ("avx2", "fma"),
}
_SIMD = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm", "fphp")


@cache
def cpu_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = re.search(r"(?m)^(?:flags|Features)\s*:(.*)", text)
    flags = found[1].split() if found else []
    return tuple(sorted(flag for flag in flags if flag.startswith(_SIMD) or flag.endswith("_vnni")))


def isa_of_core(core: str | None) -> str | None:
    return ISA_OF_CORE.get(core.lower()) if core else None


def environment_for(isa: str, device: str) -> dict[str, str]:
    """Return the variables that cap the libraries of `device` at `isa`. Raises WrongUsage, HardwareMissing."""
    if isa not in CHOICES:
        raise WrongUsage(f"{isa!r} is not known", where="--isa", remedy=f"Choose one of {', '.join(CHOICES)}.")
    if isa == "auto":
        return {}
    if device == "numpy" and isa not in _CORE_FOR:
        raise HardwareMissing(
            f"NumPy computes in float32, which never runs on {isa}",
            where=f"--isa {isa}",
            remedy="Measure --isa avx512 or avx2 with --device numpy, or install latfit[amx] for --device openvino.",
        )
    if missing := missing_flags(FLAGS_FOR[isa], cpu_flags()):
        raise HardwareMissing(missing, where=f"--isa {isa}", remedy="Use --isa auto.")
    return {"OPENBLAS_CORETYPE": _CORE_FOR[isa]} if device == "numpy" else {"ONEDNN_MAX_CPU_ISA": _ONEDNN_CAP[isa]}


def missing_flags(wanted: Sequence[str], flags: Sequence[str]) -> str:
    absent = [flag for flag in wanted if flag not in flags]
    return f"this CPU lacks {', '.join(absent)}" if absent else ""
