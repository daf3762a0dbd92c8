"""Whether this CPU and this kernel let a program use AMX.

The CPU says so by its flags. On Linux a program must also ask the kernel for the 8 KiB of tile registers, because they
enlarge every thread's saved state (Documentation/arch/x86/xstate.rst in the kernel's sources): arch_prctl with
ARCH_REQ_XCOMP_PERM grants it for the rest of the process, ARCH_GET_XCOMP_PERM tells what is granted. Neither says that
a product ran on AMX; `dispatch` looks for that.
"""

import ctypes
import platform
from typing import Any

from latfit.profiler.isa import cpu_flags

FLAGS = ("amx_tile", "amx_bf16", "amx_int8")

_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_PERM = 0x1022
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def amx_facts() -> dict[str, Any]:
    """The CPU's AMX flags, and whether the kernel grants tile data to this process (None where it cannot be asked)."""
    return {"flags": [flag for flag in FLAGS if flag in cpu_flags()], "permission": tile_permission()}


def missing_for_amx(flags: tuple[str, ...], permission: bool | None, *, int8: bool) -> str | None:
    """What hinders products in bf16 (or int8) on AMX, in words; None where nothing is known to."""
    wanted = ("amx_tile", "amx_int8" if int8 else "amx_bf16")
    absent = [flag for flag in wanted if flag not in flags]
    if absent:
        return f"this CPU lacks {', '.join(absent)}"
    if permission is False:
        return "the kernel refuses the permission for AMX tile data (arch_prctl ARCH_REQ_XCOMP_PERM)"
    return None


def tile_permission() -> bool | None:
    """Ask the kernel for tile data and say whether it is granted; None where this system has no such call."""
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
