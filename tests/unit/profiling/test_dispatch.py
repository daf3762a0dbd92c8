"""What ran is read from what oneDNN and OpenVINO say they ran; where AMX cannot be, it is refused.

Lines with AMX cannot be made on every machine, so they are quoted from where they are published:
- PYTORCH: the PyTorch tutorial "Leverage Intel Advanced Matrix Extensions" (prototype_source/amx.rst).
- VNNI: oneDNN's issue tracker, number 1969, oneDNN 3.3.
- NEWER: the form that oneDNN 3.9 and later print (`v1`, implementations named after AVX10.1), as PyTorch reports it.
- OLD: oneDNN's developer guide, "Verbose Mode", of version 1.3, when the marker was `dnnl_verbose`.
"""

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from latfit.errors import HardwareMissing
from latfit.profiling.devices import select
from latfit.profiling.host import executed_isa, isa as amx
from latfit.profiling.host.executed_isa import (
    evidence_of,
    isa_of_header,
    isa_of_kernel,
    satisfies,
)
from latfit.profiling.host.isa import cpu_flags

AMX_HEADER = (
    "onednn_verbose,info,cpu,isa:Intel AVX-512 with float16, Intel DL Boost and bfloat16 support and Intel AMX with "
    "bfloat16 and 8-bit integer support"
)
PYTORCH = f"""\
onednn_verbose,info,oneDNN v2.7.3 (commit 6dbeffbae1f23cbbeae17adb7b5b13f1f37c080e)
onednn_verbose,info,cpu,runtime:OpenMP,nthr:128
{AMX_HEADER}
onednn_verbose,info,gpu,runtime:none
onednn_verbose,info,prim_template:operation,engine,primitive,implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time
onednn_verbose,exec,cpu,reorder,simple:any,undef,src_f32::blocked:a:f0 dst_f32::blocked:a:f0,attr-scratchpad:user ,,2,5.2561
onednn_verbose,exec,cpu,convolution,jit:avx512_core_amx_bf16,forward_training,src_bf16::blocked:acdb:f0 wei_bf16:p:blocked:ABcd16b16a2b:f0 bia_f32::blocked:a:f0 dst_bf16::blocked:acdb:f0,attr-scratchpad:user ,alg:convolution_direct,mb7_ic2oc1_ih224oh111kh3sh2dh1ph1_iw224ow111kw3sw2dw1pw1,0.628906
onednn_verbose,exec,cpu,matmul,brg:avx512_core_amx_int8,undef,src_s8::blocked:ab:f0 wei_s8:p:blocked:BA16a64b4a:f0 dst_s8::blocked:ab:f0,attr-scratchpad:user ,,1x30522:30522x768:1x768,7.66382
"""  # noqa: E501 - quoted
VNNI = """\
onednn_verbose,info,oneDNN v3.3.0 (commit N/A)
onednn_verbose,info,cpu,isa:Intel AVX-512 with Intel DL Boost
onednn_verbose,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time
onednn_verbose,primitive,exec,cpu,inner_product,brgemm:avx512_core_vnni,forward_inference,src_u8::blocked:ab::f0 wei_s8:a:blocked:AB4b64a4b::f0 bia_s8::blocked:a::f0 dst_u8:a:blocked:ab::f0,,,mb32ic64oc256,0.0449219
"""  # noqa: E501 - quoted
NEWER = """\
onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with float16, Intel DL Boost and bfloat16 support and Intel AMX with bfloat16 and 8-bit integer support
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,src:bf16::blocked:ab::f0 wei:bf16::blocked:ab::f0 dst:bf16::blocked:ab::f0,,,64x128:128x256,0.1
"""  # noqa: E501 - quoted
OLD = """\
dnnl_verbose,info,DNNL v1.3.0 (commit d0fc158e98590dfad0165e568ca466876a794597)
dnnl_verbose,info,cpu,isa:Intel AVX2
dnnl_verbose,exec,cpu,convolution,jit:avx2,forward_inference,src_f32::blocked:aBcd8b:f0 wei_f32::blocked:ABcd8b8a:f0 dst_f32::blocked:aBcd8b:f0,,alg:convolution_direct,mb2_ic16oc16_ih7oh7kh5sh1dh0ph2_iw7ow7kw5sw1dw0pw2,0.0170898
"""  # noqa: E501 - quoted


class TestVerboseLines:
    @pytest.mark.parametrize(
        ("text", "isa", "allowed"),
        [
            (PYTORCH, "amx", "amx"),
            (VNNI, "avx512_vnni", "avx512_vnni"),
            (NEWER, "amx", "amx"),
            (OLD, "avx2", "avx2"),
            ("", None, None),
        ],
    )
    def test_published_logs(self, text: str, isa: str | None, allowed: str | None) -> None:
        found = evidence_of(f"Loading...\n{text}done\n")
        assert (found["isa"], found["onednn_allows"]) == (isa, allowed)

    def test_only_products_count(self) -> None:
        assert evidence_of(PYTORCH)["products"] == {
            "convolution,jit:avx512_core_amx_bf16": 1,
            "matmul,brg:avx512_core_amx_int8": 1,
        }

    def test_the_header_alone_proves_nothing(self) -> None:
        """A CPU with AMX on which the AVX-512 kernel ran is no AMX measurement."""
        ran = NEWER.replace("avx10_1_512_amx", "avx512_core_bf16")
        assert evidence_of(ran)["isa"] == "avx512_bf16"
        assert evidence_of(f"{AMX_HEADER}\n")["isa"] is None

    def test_a_kernel_that_names_none_uses_what_the_header_allows(self) -> None:
        line = "onednn_verbose,v1,primitive,exec,cpu,matmul,gemm:jit:f32,undef,,,,1x2:2x3,0.1"
        header = "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost"
        assert evidence_of(f"{header}\n{line}")["isa"] == "avx512_vnni"

    @pytest.mark.parametrize(
        "damage", ["onednn_verbose", "onednn_verbose,exec", "onednn_verbose,exec,cpu,matmul", ",,,"]
    )
    def test_damaged_lines_are_passed_over(self, damage: str) -> None:
        assert evidence_of(damage)["isa"] is None

    @pytest.mark.parametrize(
        ("name", "isa"),
        [
            ("brg_matmul:avx512_core_amx_fp16", "amx"),
            ("brgemm_avx512_amx_bf16", "amx"),
            ("brgemm_avx512_bf16", "avx512_bf16"),
            ("brgconv_avx512", "avx512"),
            ("brg_matmul:avx512_core_fp16", "avx512_fp16"),
            ("brgemm:avx2_vnni_2", "avx2_vnni"),
            ("gemm_mlas_f32", None),
            ("ref_any_f32", None),
        ],
    )
    def test_names_of_kernels(self, name: str, isa: str | None) -> None:
        assert isa_of_kernel(name) == isa

    @pytest.mark.parametrize(
        ("text", "isa"),
        [
            ("Intel AVX-512 with Intel DL Boost and bfloat16 support ", "avx512_bf16"),
            ("Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions", "avx512"),
            ("Intel AVX10.1 and Intel AMX with bfloat16, float16 and 8-bit integer support", "amx"),
            ("Intel SSE4.1", "sse4_1"),
            ("AArch64 SVE (256 bits)", None),
        ],
    )
    def test_headers(self, text: str, isa: str | None) -> None:
        assert isa_of_header(text) == isa

    def test_what_an_option_means(self) -> None:
        assert satisfies("avx512_vnni", "avx512")
        assert satisfies(None, "auto")
        assert not satisfies("avx512_bf16", "amx")
        assert not satisfies(None, "avx2")


class Kernel:
    """A C library whose `syscall` answers like a Linux kernel that grants `mask`, or that is too old to know."""

    def __init__(self, mask: int | None) -> None:
        self.mask = mask
        self.asked: list[int] = []

        def syscall(number: Any, operation: Any, argument: Any) -> int:
            assert number.value == 158
            self.asked.append(operation.value)
            if operation.value == 0x1022 and self.mask is not None:
                argument._obj.value = self.mask
                return 0
            return -1

        self.syscall: Any = syscall


class TestPermission:
    @pytest.mark.parametrize(("mask", "granted"), [(0x602E7, True), (0x2E7, False), (None, None)])
    def test_the_granted_mask_counts(self, mask: int | None, granted: bool | None) -> None:
        kernel = Kernel(mask)
        assert amx._permission(kernel) is granted
        assert kernel.asked == [0x1023, 0x1022]

    def test_here(self) -> None:
        permission = amx.tile_permission()
        assert permission in (True, False, None)
        if permission:
            assert "amx_tile" in amx.cpu_flags()

    @pytest.mark.parametrize(
        ("flags", "permission", "int8", "found"),
        [
            ((), True, False, "lacks amx_tile, amx_bf16"),
            (("amx_tile", "amx_bf16"), True, True, "lacks amx_int8"),
            (("amx_tile", "amx_bf16"), False, False, "kernel refuses"),
            (("amx_tile", "amx_bf16"), None, False, None),
            (("amx_tile", "amx_int8"), True, True, None),
        ],
    )
    def test_what_hinders_is_named(
        self, flags: tuple[str, ...], permission: bool | None, int8: bool, found: str | None
    ) -> None:
        reason = amx.missing_for_amx(flags, permission, int8=int8)
        assert reason is None if found is None else found in str(reason)


class TestRefusal:
    def test_amx_that_did_not_run_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flags and permission are there, and yet oneDNN ran AVX-512: never a silent fallback."""
        monkeypatch.setattr(select, "missing_for_amx", lambda *_, **__: None)
        monkeypatch.setattr(
            select, "probe", lambda *_: evidence_of(NEWER.replace("avx10_1_512_amx", "avx512_core_bf16"))
        )
        with pytest.raises(HardwareMissing, match="ran on avx512_bf16 under that cap"):
            select.proved.__wrapped__("openvino", "bf16", "amx")

    def test_amx_that_ran_is_evidence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(select, "missing_for_amx", lambda *_, **__: None)
        monkeypatch.setattr(select, "probe", lambda *_: evidence_of(NEWER))
        found = select.proved.__wrapped__("openvino", "bf16", "amx")
        assert found["isa"] == "amx"
        assert found["products"] == {"matmul,brg_matmul:avx10_1_512_amx": 1}

    def test_a_probe_that_fails_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = executed_isa.run_probe([sys.executable, "-c", "raise SystemExit('no kernel for it')"], os.environ)
        assert failed == {"isa": None, "onednn_allows": None, "products": {}, "failed": "no kernel for it"}
        monkeypatch.setattr(select, "probe", lambda *_: failed)
        with pytest.raises(HardwareMissing, match="no kernel for it"):
            select.proved.__wrapped__("torch-cpu", "fp32", "avx2")

    @pytest.mark.skipif("amx_tile" in cpu_flags(), reason="this CPU has AMX")
    def test_a_cpu_without_amx_is_refused_by_its_flags(self) -> None:
        with pytest.raises(HardwareMissing, match="this CPU lacks amx_tile"):
            select.proved.__wrapped__("openvino", "bf16", "amx")


@pytest.fixture(params=["openvino", "torch-cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """A library that is installed, on a CPU with AVX-512-BF16."""
    if find_spec(select.KINDS[request.param].library) is None:
        pytest.skip(f"{select.KINDS[request.param].library} is not installed")
    if "avx512_bf16" not in cpu_flags():
        pytest.skip("this CPU has no AVX-512-BF16")
    return str(request.param)


class TestHere:
    """The probe itself, on this CPU: what ran can be no more than what the CPU has."""

    def test_bf16_runs_on_what_the_cpu_has(self, device: str) -> None:
        wanted = "amx" if "amx_bf16" in cpu_flags() else "avx512_bf16"
        assert executed_isa.probe(device, "bf16", "auto")["isa"] == wanted

    def test_a_cap_below_is_kept(self, device: str) -> None:
        """Capped at AVX2, bfloat16 leaves oneDNN or is computed in float32; it never runs on AVX-512."""
        assert executed_isa.probe(device, "fp32", "avx2")["isa"] in ("avx2", None)

    @pytest.mark.skipif("amx_tile" in cpu_flags(), reason="this CPU has AMX")
    def test_asking_for_amx_gives_none(self, device: str) -> None:
        """What the option would do without our refusal: oneDNN takes the cap and runs AVX-512 without a word."""
        command = [sys.executable, "-m", "latfit.profiling.host.executed_isa", device, "bf16"]
        environment = {**os.environ, "ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}
        assert executed_isa.run_probe(command, environment)["isa"] == "avx512_bf16"


def test_the_library_of_this_process_is_the_one_asked() -> None:
    """A process without AMX permission code: ctypes finds `syscall` in the C library on Linux."""
    if sys.platform != "linux":
        pytest.skip("arch_prctl is Linux's")
    assert hasattr(ctypes.CDLL(None), "syscall")
    program = "from latfit.profiling.host.isa import tile_permission; tile_permission()"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
