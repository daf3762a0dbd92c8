"""Instruction sets: what the CPU has, what a BLAS kernel set runs, how to cap a library, and whether AMX may be used.

Libraries choose their kernels while they load, so a cap is an environment variable of the process that will load them.
On Linux a program must ask the kernel for AMX's tile registers (Documentation/arch/x86/xstate.rst in its sources).
Neither flags nor permission say that a product ran on AMX; `executed_isa` looks for that."""

import ctypes
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
    """Return the CPU's flags of vector and matrix arithmetic, sorted; empty if the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return tuple(sorted(flag for flag in value.split() if flag.startswith(_SIMD) or flag.endswith("_vnni")))
    return ()


def isa_of_core(core: str | None) -> str | None:
    """Return what float32 products run on under an OpenBLAS kernel set; None if unknown."""
    return ISA_OF_CORE.get(core.lower()) if core else None


def best_float32_isa(flags: tuple[str, ...]) -> str | None:
    """The widest instruction set of `flags` that BLAS has float32 kernels for."""
    return next((isa for isa in ("avx512", "avx2") if set(FLAGS_FOR[isa]) <= set(flags)), None)


def environment_for(isa: str, device: str) -> dict[str, str]:
    """Return the environment variables that cap the libraries of `device` at `isa`.

    Raises WrongUsage for an unknown name; HardwareMissing if the CPU, or NumPy's float32, has no such kernels.
    """
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
    missing = [flag for flag in FLAGS_FOR[isa] if flag not in cpu_flags()]
    if missing:
        raise HardwareMissing(f"this CPU lacks {', '.join(missing)}", where=f"--isa {isa}", remedy="Use --isa auto.")
    return {"OPENBLAS_CORETYPE": _CORE_FOR[isa]} if device == "numpy" else {"ONEDNN_MAX_CPU_ISA": _ONEDNN_CAP[isa]}


_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_PERM = 0x1022
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def missing_for_amx(flags: tuple[str, ...], permission: bool | None, *, int8: bool) -> str | None:
    """Return what hinders products in bf16 (or int8) on AMX, in words; None if nothing is known to."""
    wanted = ("amx_tile", "amx_int8" if int8 else "amx_bf16")
    absent = [flag for flag in wanted if flag not in flags]
    if absent:
        return f"this CPU lacks {', '.join(absent)}"
    if permission is False:
        return "the kernel refuses the permission for AMX tile data (arch_prctl ARCH_REQ_XCOMP_PERM)"
    return None


def tile_permission() -> bool | None:
    """Ask the kernel for tile data and return whether it is granted; None if this system has no such call."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    return _permission(ctypes.CDLL(None, use_errno=True))


def _permission(library: Any) -> bool | None:
    """The same with the C library given. The request fails on CPUs without AMX; what counts is the granted mask."""
    syscall = library.syscall
    syscall.restype = ctypes.c_long
    number = ctypes.c_long(_SYS_ARCH_PRCTL)
    syscall(number, ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_ulong(_XFEATURE_XTILEDATA))
    granted = ctypes.c_uint64(0)
    if syscall(number, ctypes.c_long(_ARCH_GET_XCOMP_PERM), ctypes.byref(granted)) != 0:
        return None  # a kernel before 5.16
    return bool(granted.value >> _XFEATURE_XTILEDATA & 1)
