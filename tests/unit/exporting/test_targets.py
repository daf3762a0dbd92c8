"""What every target writes, read by parsers that latfit has no part in."""

import ast
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest

import latfit
from latfit.engines import engine_key
from latfit.errors import BadInput, FitNotUsable, LatfitError, SlaOutOfReach, WrongUsage
from latfit.exporting import TARGETS, Exported, start_line
from tests.unit.exporting.parsers import commented, options, program, read_pbtxt, read_yaml
from tests.unit.exporting.plans import VLLM, of_batches, of_requests, of_steps, with_pair

SHAPE = "input:Bx3x224x224"


class TestVllm:
    def test_yaml_and_command_line_say_what_the_plan_says(self) -> None:
        found = latfit.export(of_requests(), "vllm", model="org/model")
        assert read_yaml(found.files["vllm.yaml"]) == {
            "model": "org/model",
            **{name.replace("_", "-"): value for name, value in VLLM.items()},
        }
        assert options(found.files["vllm.sh"]) == [
            *("--max-num-seqs", "96", "--max-num-batched-tokens", "4096", "--long-prefill-token-threshold", "512")
        ]
        assert program(found.files["vllm.sh"])[:4] == ["exec", "vllm", "serve", "org/model"]
        assert found.settings == VLLM

    def test_switches_that_are_off_go_by_their_option(self) -> None:
        """vLLM leaves out of its YAML what is false."""
        flags = {"vllm": {**VLLM, "enable_chunked_prefill": False, "async_scheduling": False, "max_model_len": 4096}}
        found = latfit.export(of_requests(engines=flags), "vllm")
        assert read_yaml(found.files["vllm.yaml"])["no-enable-chunked-prefill"] is True
        assert "--no-async-scheduling" in options(found.files["vllm.sh"])

    def test_a_model_that_nobody_named_is_asked_for(self) -> None:
        found = latfit.export(of_requests(), "vllm")
        assert "model" not in read_yaml(found.files["vllm.yaml"])
        assert "${MODEL:?" in found.files["vllm.sh"].splitlines()[-1]

    def test_a_recorded_engine_names_its_model_and_its_gpus(self) -> None:
        fit = {**of_requests()["fits"][0], "system": {"engine": "vllm", "model": "org/recorded", "tp": "4"}}
        found = latfit.export(of_requests(fits=[fit]), "vllm")
        assert read_yaml(found.files["vllm.yaml"])["model"] == "org/recorded"
        assert found.settings["tensor_parallel_size"] == 4

    def test_an_order_that_it_lacks_is_refused(self) -> None:
        engine = {**of_requests()["engine"], "order": "sjf"}
        with pytest.raises(WrongUsage, match="by sjf, which vLLM does not do"):
            latfit.export(of_requests(engine=engine), "vllm")


class TestSglang:
    def test_the_command_line(self) -> None:
        found = latfit.export(of_requests(), "sglang", model="org/model")
        assert options(found.files["sglang.sh"]) == [
            *("--max-running-requests", "96", "--chunked-prefill-size", "4096", "--enable-mixed-chunk")
        ]
        assert program(found.files["sglang.sh"])[1:6] == [
            *("python3", "-m", "sglang.launch_server", "--model-path", "org/model")
        ]
        assert "512 tokens for one prompt's part" in " ".join(commented(found.files["sglang.sh"])["set -eu"].split())

    def test_a_length_of_prompts_is_for_ktransformers_build_alone(self) -> None:
        """The CPU takes 1 ms a token, the GPU 20 ms and .1: it is as fast from 20 / .9 on, that is 23 tokens."""
        paths = {"amx": "launch=0.001ms,slope=0ms,per_token=1ms", "gpu": "launch=20ms,slope=0ms,per_token=0.1ms"}
        script = latfit.export(latfit.plan(paths, "60ms"), "sglang").files["sglang.sh"]
        assert not [word for word in options(script) if "kt" in word]
        told = " ".join(commented(script)["set -eu"].split())
        assert "build of SGLang" in told
        assert "--kt-gpu-prefill-token-threshold 23." in told

    @pytest.mark.parametrize("said", ["9" * 5000, "0", "-1", "2.5", "x"])
    def test_a_number_of_gpus_that_is_none_is_left_out(self, said: str) -> None:
        fit = {**of_requests()["fits"][0], "system": {"tp": said}}
        assert "tensor_parallel_size" not in latfit.export(of_requests(fits=[fit]), "sglang").settings


class TestTrtllm:
    def test_the_yaml(self) -> None:
        found = read_yaml(latfit.export(of_requests(), "trtllm").files["trtllm.yaml"])
        assert found == {
            "max_batch_size": 96,
            "max_num_tokens": 4096,
            "enable_chunked_prefill": True,
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        }


class TestLlamaCpp:
    def test_the_command_line(self) -> None:
        found = latfit.export(of_requests(), "llamacpp", model="m.gguf")
        script = found.files["llama-server.sh"]
        assert options(script) == [*("--parallel", "96", "--batch-size", "4096", "--ctx-size", "16000", "--kv-unified")]
        assert program(script)[:4] == ["exec", "llama-server", "--model", "m.gguf"]
        told = " ".join(commented(script)["set -eu"].split())
        assert "512 tokens for one prompt's part" in told
        assert "plan with --synchronous" in told
        assert "tensor parallelism" not in told

    def test_whole_prompts_are_refused(self) -> None:
        flags = {"vllm": {**VLLM, "enable_chunked_prefill": False}}
        with pytest.raises(WrongUsage, match="adds prompts to any step"):
            latfit.export(of_requests(engines=flags), "llamacpp")


class TestTriton:
    def test_a_cutoff_has_two_models_and_a_router(self) -> None:
        plan = of_batches()
        found = latfit.export(plan, "triton", model="Org/Model 1")
        gpu = read_pbtxt(found.files["org-model-1-gpu/config.pbtxt"])
        cpu = read_pbtxt(found.files["org-model-1-amx/config.pbtxt"])
        assert gpu == {
            "name": "org-model-1-gpu",
            "max_batch_size": 160,  # 12 + 0.05 * 160 = 20
            "dynamic_batching": {"max_queue_delay_microseconds": 0},
            "instance_group": [{"count": 1, "kind": "KIND_GPU"}],
        }
        assert cpu == {
            "name": "org-model-1-amx",
            "max_batch_size": 1,
            "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        }
        names: dict[str, Any] = {}
        constants = re.findall(r"^(?:GPU, CPU|MAX_BATCH|T_CUT_S) = .*$", found.files["router.py"], flags=re.M)
        exec("\n".join(constants), names)
        assert (names["GPU"], names["CPU"], names["MAX_BATCH"]) == ("org-model-1-gpu", "org-model-1-amx", 160)
        assert names["T_CUT_S"] == plan["T_cut_ms"]["value"] / 1e3
        compile(found.files["router.py"], "router.py", "exec")

    def test_paths_whose_names_have_no_latin_letters_are_two_models(self) -> None:
        plan = json.loads(json.dumps(of_batches()).replace('"amx"', '"\\u5904"').replace('"gpu"', '"\\u663e"'))
        found = latfit.export(plan, "triton")
        assert len(found.files) == 3
        names = re.search(r"^GPU, CPU = '(.*)', '(.*)'$", found.files["router.py"], flags=re.M)
        assert names is not None
        assert {f"{each}/config.pbtxt" for each in names.groups()} < found.files.keys()


class TestTensorrt:
    def test_profile_and_flags(self) -> None:
        plan = of_batches()
        found = latfit.export(plan, "tensorrt", shapes=[SHAPE, "mask:0:BxS"])
        B2 = plan["B2"]["value"]
        profile = read_yaml(found.files["tensorrt.yaml"])
        assert profile["profile"]["opt"] == {"input": [B2, 3, 224, 224], "mask:0": [B2, 1]}
        assert profile["profile"]["max"]["input"][0] == 160
        warm = [each["input"][0] for each in profile["warm_up"]]
        assert warm == sorted({1, 160, B2, plan["B1"]["value"], plan["B1_at_rate"]["value"]})
        assert options(found.files["trtexec.sh"]) == [
            "--minShapes=input:1x3x224x224,'mask:0':1x1",
            f"--optShapes=input:{B2}x3x224x224,'mask:0':{B2}x1",
            "--maxShapes=input:160x3x224x224,'mask:0':160x1",
        ]

    @pytest.mark.parametrize(
        "shape", ["", "input", ":Bx3", "input:3x224", "input:Bx0", "input:Bx-1", "in put:B", "input:Bx1e3", "i'n:B"]
    )
    def test_a_shape_that_is_none(self, shape: str) -> None:
        with pytest.raises(WrongUsage, match="is not the shape"):
            latfit.export(of_steps(), "tensorrt", shapes=[shape])


class TestKubernetes:
    def test_deployment_and_service(self) -> None:
        import yaml

        fit = {**of_requests()["fits"][0], "system": {"engine": "vllm", "engine_version": "0.32.0", "tp": "2"}}
        plan = of_requests(fits=[fit])
        found = latfit.export(plan, "kubernetes", model="org/Model.7B")
        deployment, service = yaml.safe_load_all(found.files["vllm-kubernetes.yaml"])
        spec = deployment["spec"]
        container = spec["template"]["spec"]["containers"][0]
        assert spec["replicas"] == 3
        assert container["image"] == "vllm/vllm-openai:v0.32.0"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        assert container["command"] == ["vllm", "serve"]
        # the same words as of the command line
        words = options(latfit.export(plan, "vllm").files["vllm.sh"])
        assert [word for each in container["args"][1:] for word in each.split("=")] == words
        assert container["args"][0] == "org/Model.7B"
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", deployment["metadata"]["name"])

    def test_names_fit_into_those_of_a_service(self) -> None:
        """A DNS label has 63 letters at most (RFC 1035)."""
        import yaml

        found = latfit.export(with_pair(), "kubernetes", model="/mnt/models/" + "long-name-" * 20)
        names = [each["metadata"]["name"] for text in found.files.values() for each in yaml.safe_load_all(text)]
        assert len(names) == 6
        assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each) for each in names)

    def test_a_model_is_needed(self) -> None:
        with pytest.raises(WrongUsage, match="does not name the model"):
            latfit.export(of_requests(), "kubernetes")


def planned(target: str) -> dict[str, Any]:
    return of_requests() if target in ("vllm", "sglang", "trtllm", "llamacpp", "kubernetes") else of_batches()


def engines_of(target: str) -> dict[str, Any]:
    found: dict[str, Any] = planned(target)["engines"]
    return found


def exported(target: str, **changed: Any) -> Exported:
    given: dict[str, Any] = {"shapes": [SHAPE]} if target == "tensorrt" else {"model": "m"}
    return latfit.export({**planned(target), **changed}, target, **given)


@pytest.mark.parametrize("target", TARGETS)
def test_every_number_has_its_reason_and_every_file_its_plan(target: str) -> None:
    found = exported(target)
    for name, text in found.files.items():
        above = commented(text)
        values = [line for line in above if re.search(SETTING[target], line)]
        assert values or name == "router.py", f"{name} has no settings"
        assert all(above[line].endswith(".") for line in values)
        head = " ".join(line.lstrip("# ") for line in text.splitlines()[:20])
        for part in ("the plan (sha256 ", "Holds for ", "Rests on "):
            assert part in head
        assert "6.4 % off" in head or "error on unseen steps unknown" in head


SETTING = {
    "vllm": r"^--[a-z-]+ |^[a-z-]+-(seqs|tokens|threshold): ",
    "sglang": "^--",
    "llamacpp": "^--",
    "trtllm": "^(max_|enable_|capacity_)",
    "triton": "^(max_|preferred_|count:|MAX_BATCH|T_CUT)",
    "tensorrt": "^(min|opt|max|warm_up):|^--|^'--",
    "kubernetes": '^replicas:|^- "--|nvidia',
}


class TestPlansThatAreNone:
    def test_an_unknown_target_names_those_known(self) -> None:
        with pytest.raises(WrongUsage, match=f"Take one of {', '.join(TARGETS)}"):
            latfit.export(of_requests(), "tgi")

    def test_not_feasible(self) -> None:
        with pytest.raises(SlaOutOfReach, match="cannot be met: p99 TTFT"):
            latfit.export(of_requests(feasible=False), "vllm")

    def test_not_supported(self) -> None:
        with pytest.raises(FitNotUsable, match="not supported by its data: steps of 900"):
            latfit.export(of_requests(unsupported=["steps of 900 were not measured"]), "vllm")

    @pytest.mark.parametrize(
        "document", [{}, {"feasible": True}, {"runs": []}, {"feasible": 1, "engines": 2, "promise": 3}]
    )
    def test_another_document(self, document: dict[str, Any]) -> None:
        with pytest.raises(BadInput):
            latfit.export(document, "vllm")

    def test_options_that_do_nothing(self) -> None:
        with pytest.raises(WrongUsage, match="has no effect on tensorrt"):
            latfit.export(of_steps(), "tensorrt", model="m", shapes=[SHAPE])
        with pytest.raises(WrongUsage, match="has no effect on vllm"):
            latfit.export(of_requests(), "vllm", shapes=[SHAPE])


NAMES = (
    "a b", "org/it's", 'say "hi"', "$(touch owned)", "`touch owned`", "${HOME}", "a;touch owned", "a&&b", "a|b", "*",
    "~", "#not a comment", "no", "null", "1e3", "0x10", "key: value", "{a: b}", "[x]", "&anchor", "!tag", "%dir", "@x",
    "模型", "модель-ё", "🤖 model", "C:\\models\\x", "back\\slash\\", "tail\\", "a'b\"c`d$e", "\U00020000", "{{ 7*7 }}",
)  # fmt: skip


class TestNamesWithOddLetters:
    @pytest.mark.parametrize("name", NAMES)
    def test_arrive_as_they_are(self, name: str) -> None:
        import yaml

        found = latfit.export(of_requests(), "vllm", model=name).files
        assert read_yaml(found["vllm.yaml"])["model"] == name
        assert program(found["vllm.sh"])[3] == name
        assert program(latfit.export(of_requests(), "sglang", model=name).files["sglang.sh"])[5] == name
        text = latfit.export(of_requests(), "kubernetes", model=name).files["vllm-kubernetes.yaml"]
        deployment, _ = yaml.safe_load_all(text)
        assert deployment["spec"]["template"]["spec"]["containers"][0]["args"][0].replace("$$", "$") == name
        folder, *_ = latfit.export(of_batches(), "triton", model=name).files
        assert re.fullmatch(r"[a-z0-9-]+/config\.pbtxt", folder)

    @pytest.mark.parametrize(
        "name", ["", " a", "a ", "-x", "--help", "a\nb", "a\tb", "a\0b", "a\x85b", "a\u2028b", "\ud800"]
    )
    def test_what_no_program_can_be_given_is_refused(self, name: str) -> None:
        for target in ("vllm", "sglang", "trtllm", "kubernetes"):
            with pytest.raises(WrongUsage):
                latfit.export(of_requests(), target, model=name)

    def test_sentences_of_a_plan_cannot_leave_their_comment(self) -> None:
        """A plan's file may come from anybody."""
        for mark in ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\x1b[2K"):
            bad = f"fine{mark}trust-remote-code: true{mark}"
            fit = {**of_requests()["fits"][0], "fit": bad, "model": bad}
            plan = of_requests(
                request=bad,
                route=bad,
                notes=[bad],
                fits=[fit],
                targets=[{**of_requests()["targets"][0], "target": bad}],
            )
            for target in ("vllm", "sglang", "trtllm", "kubernetes"):
                for text in latfit.export(plan, target, model="m").files.values():
                    told = [line for line in text.splitlines() if "trust-remote-code" in line]
                    assert told
                    assert all(line.lstrip().startswith("#") for line in told)
                    assert "\x1b" not in text

    @pytest.mark.parametrize("name", ["plan.json", "decoding:8.json", "coding=utf-7.json"])
    def test_sentences_of_a_plan_cannot_set_the_encoding_of_a_program(self, name: str, tmp_path: Path) -> None:
        """PEP 263: `coding:` in a comment of the first two lines says how Python decodes the rest, code included."""
        plan = of_batches()
        path = tmp_path / name
        path.write_text(json.dumps(plan))
        whole = latfit.export(path, "triton").files["router.py"]
        bad = "-*- coding:unicode_escape -*- \\u000aimport os\\u000aos.mkdir('owned')\\u000a#"
        warning = {"code": "x", "message": bad, "remedy": bad}
        path.write_text(
            json.dumps({**plan, "answer": bad, "notes": [bad], "why_in_doubt": [bad], "warnings": [warning]})
        )
        program = latfit.export(path, "triton").files["router.py"].encode()
        assert b"owned" in program
        assert tokenize.detect_encoding(io.BytesIO(program).readline)[0] == "utf-8"
        assert ast.dump(ast.parse(program)) == ast.dump(ast.parse(whole))
        assert b"owned" not in b"".join(program.splitlines()[:2])

    @pytest.mark.parametrize("value", ["8; touch owned", 8.5, True, None, -3, 2**40, [1, "x"], {"a": 1}, float("nan")])
    def test_a_number_that_is_none_is_refused(self, value: Any) -> None:
        plan = of_requests()
        plan["engines"]["vllm"]["long_prefill_token_threshold"] = value
        if value is True or value == [1, "x"]:
            plan["engines"]["vllm"]["long_prefill_token_threshold"] = "a b"
        with pytest.raises(BadInput, match="not a latfit plan"):
            latfit.export(plan, "vllm")

    def test_a_setting_that_is_no_name_is_refused(self) -> None:
        plan = of_requests(engines={"vllm": {"max_num_seqs 9 --trust-remote-code": 1}})
        with pytest.raises(BadInput):
            latfit.export(plan, "vllm")


@pytest.mark.parametrize("key", sorted(of_requests()))
@pytest.mark.parametrize("value", [None, 0, "x", [], {}, [None], {"a": "b"}, -1e308, True])
def test_a_plan_that_was_changed_by_hand_is_an_error_with_a_remedy_or_fine(key: str, value: Any) -> None:
    for target in ("vllm", "kubernetes", "triton"):
        try:
            latfit.export(of_requests(**{key: value}), target, **({} if target == "triton" else {"model": "m"}))
        except LatfitError as error:
            assert error.remedy


BROKEN: tuple[Any, ...] = ("x", True, False, None, [], [1], ["x"], {}, -2, 0.5, "\ud800")


@pytest.mark.parametrize("value", BROKEN)
def test_a_setting_that_was_changed_by_hand_is_an_error_with_a_remedy_or_fine(value: Any) -> None:
    for target in TARGETS:
        engine = "vllm" if target == "kubernetes" else target
        for name in engines_of(target)[engine]:
            for changed in ({**engines_of(target)[engine], name: value}, {name: value}, {}):
                try:
                    exported(target, engines={**engines_of(target), engine: changed})
                except LatfitError as error:
                    assert error.remedy


def test_a_switch_that_an_engine_lacks_is_refused() -> None:
    with pytest.raises(BadInput, match="enable_mixed_chunk False is no setting"):
        exported("sglang", engines={"sglang": {"enable_mixed_chunk": False}})


@pytest.mark.parametrize(
    ("said", "key", "begins"),
    [
        ("vLLM", "vllm", "vllm serve --max-num-seqs 8"),
        ("SGLang", "sglang", "python3 -m sglang.launch_server --max-running-requests 8 --enable-mixed-chunk"),
        ("tensorrt_llm", "trtllm", "max_batch_size: 8 (latfit export trtllm"),
        ("llama.cpp", "llamacpp", "llama-server --parallel 8"),
        ("transformers", "vllm", "vllm serve"),
    ],
)
def test_a_plan_names_the_command_of_the_engine_that_was_measured(said: str, key: str, begins: str) -> None:
    flags = {
        "vllm": {"max_num_seqs": 8},
        "sglang": {"max_running_requests": 8, "enable_mixed_chunk": True, "kt_gpu_prefill_token_threshold": 9},
        "trtllm": {"max_batch_size": 8},
        "llamacpp": {"parallel": 8},
    }
    assert engine_key([{}, {"engine": said}]) == key
    assert start_line(key, flags).startswith(begins)
    assert "kt-gpu" not in start_line(key, flags)


def test_no_command_for_what_the_engine_does_not_do() -> None:
    assert start_line("llamacpp", {"vllm": {}}).startswith("no setting of llama.cpp does this")
    assert "by sjf" in start_line("vllm", {"vllm": {"max_num_seqs": 8}}, "sjf", "MODEL")
    assert start_line("llamacpp", {"llamacpp": {"parallel": 8}}, model="m") == "llama-server --model m --parallel 8"
