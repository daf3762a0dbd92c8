"""What ran is read from what oneDNN and OpenVINO say they ran; where AMX cannot be, it is refused.

Lines with AMX cannot be made on every machine, so they are quoted from where they are published:
- PYTORCH: the PyTorch tutorial "Leverage Intel Advanced Matrix Extensions" (prototype_source/amx.rst).
- VNNI: oneDNN's issue tracker, number 1969, oneDNN 3.3.
- NEWER: the form that oneDNN 3.9 and later print (`v1`, implementations named after AVX10.1), as PyTorch reports it.
- OLD: oneDNN's developer guide, "Verbose Mode", of version 1.3, when the marker was `dnnl_verbose`.
"""

import pytest

from latfit.errors import HardwareMissing
from latfit.profiling.devices import select
from latfit.profiling.host.executed_isa import evidence_of, isa_in, satisfies

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
        assert isa_in(name) == isa

    def test_what_an_option_means(self) -> None:
        assert satisfies("avx512_vnni", "avx512")
        assert satisfies(None, "auto")
        assert not satisfies("avx512_bf16", "amx")
        assert not satisfies(None, "avx2")


class TestRefusal:
    def test_amx_that_did_not_run_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A never silent fallback: oneDNN ran AVX-512."""
        monkeypatch.setattr(
            select, "probe", lambda *_: evidence_of(NEWER.replace("avx10_1_512_amx", "avx512_core_bf16"))
        )
        with pytest.raises(HardwareMissing, match="ran on avx512_bf16 under that cap"):
            select.prove_isa.__wrapped__("openvino", "bf16", "amx")

    def test_a_probe_that_fails_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = {"isa": None, "failed": "no kernel for it"}
        monkeypatch.setattr(select, "probe", lambda *_: failed)
        with pytest.raises(HardwareMissing, match="no kernel for it"):
            select.prove_isa.__wrapped__("torch-cpu", "fp32", "avx2")
