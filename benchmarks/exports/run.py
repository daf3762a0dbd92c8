"""Exports of plans, given to the programs that they are for.

* vLLM: its own parser reads the exported YAML and command line in every version that is named; what it parses, and the
  scheduler's configuration that it makes of it, are compared with the plan's settings.
* Triton: a real server (of nvidia-pytriton) loads the exported repository, CPU stand-ins sleeping for as long as the
  plan's steps take; under a Poisson load, the steps it forms and the responses are put beside plan and simulation.
* SGLang: every option is looked up in the source of its arguments, of the wheel that is named.

What is not named is skipped, with the reason.
"""

import argparse
import json
import re
import shlex
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import latfit
from latfit.exporting import Exported

HERE = Path(__file__).parent
GPU_TOKENS = "launch=20ms,slope=0.2ms,per_token=0.02ms,max_batch=64"
STEPS = {"gpu": GPU_TOKENS}
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENV = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def main(smoke: bool = False, arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exports")
    parser.add_argument("--vllm", action="append", default=[], metavar="PYTHON[=FOLDER]")
    parser.add_argument("--triton", metavar="PYTHON")
    parser.add_argument("--sglang", metavar="WHEEL")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    plans = dict(_plans(smoke))
    _vllm(plans, given.vllm)
    _sglang(plans, given.sglang)
    _triton(given.triton, 5.0 if smoke else given.seconds)


def _plans(smoke: bool) -> Iterator[tuple[str, Any]]:
    """Plans whose settings differ in every way that they can."""
    yield "steps", latfit.plan(STEPS, "60ms")
    yield "steps, targets", latfit.plan(STEPS, "60ms", ttft="400ms", tpot="40ms", prompt_tokens=1000)
    if smoke:
        return

    def requests(**more: Any) -> Any:
        fixed = {"max_num_seqs": 48, "max_num_batched_tokens": 4096, **more.pop("engine", {})}
        classes = more.pop("classes", ())
        return latfit.plan_engine(
            None, "4/s", "300:20", ttft="3s", hardware=STEPS, replicas=1, kv_blocks=20_000, engine=fixed,
            classes=classes, **more,
        )  # fmt: skip

    yield "requests", requests()
    yield "requests, chunks of a prompt", requests(engine={"long_prefill_token_threshold": 256})
    yield "requests, one step after the other", requests(engine={"synchronous": True})
    yield "requests, whole prompts", requests(batching="continuous")
    yield "requests, by priority", requests(order="priority", classes=("chat:0.3:2s", "batch:0.7:60s"))


def _vllm(plans: Mapping[str, Any], interpreters: Sequence[str]) -> None:
    if not interpreters:
        print("vLLM: skipped, no --vllm PYTHON (of an environment with vllm or vllm-cpu)")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "a model's $(name)"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
        lines, asked = [], []
        for number, (name, plan) in enumerate(plans.items()):
            found = latfit.export(plan, "vllm", model=str(model))
            folder = Path(scratch) / str(number)
            found.save(folder)
            lines += [["serve", str(model), *_options(found.files["vllm.sh"])]]
            lines += [["serve", "--config", str(folder / "vllm.yaml")]]
            asked += [(f"{name}, command line", found), (f"{name}, YAML", found)]
        for interpreter in interpreters:
            seen = _run_vllm(interpreter, lines)
            for (name, found), each in zip(asked, seen, strict=True):
                _compare(name, found, each, str(model))


def _run_vllm(interpreter: str, lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    python, _, folder = interpreter.partition("=")
    done = subprocess.run(
        [python, str(HERE / "vllm_probe.py")], input=json.dumps(lines), capture_output=True, text=True, timeout=600,
        env={**ENV, "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": folder}, check=False,
    )  # fmt: skip
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = (done.stderr.splitlines() or ["no output"])[-1][:200]
        return [{"version": folder or python, "failed": why} for _ in lines]
    return found


def _compare(plan: str, found: Exported, seen: Mapping[str, Any], model: str) -> None:
    who = f"vLLM {seen['version']}, {plan}"
    if "failed" in seen:
        print(f"{who}: FAILED: {seen['failed']}")
        return
    wanted = {**found.settings, "model": model}
    parsed = [name for name, value in wanted.items() if seen["parsed"][name] != value]
    resolved = seen.get("resolved", {})
    other = [name for name, value in wanted.items() if name in resolved and resolved[name] != value]
    told = "configuration as planned" if resolved else f"configuration not resolved ({seen.get('unresolved')})"
    if other:
        told = f"DIFFERS resolved: {', '.join(f'{each} {resolved[each]} for {wanted[each]}' for each in other)}"
    if "max_num_seqs" in resolved and "enable_chunked_prefill" not in found.settings:
        told += f", chunked prefill {'on' if resolved['enable_chunked_prefill'] else 'OFF'}"
    differs = ", ".join(f"{each} {seen['parsed'][each]} for {wanted[each]}" for each in parsed)
    print(f"{who}: {f'DIFFERS: {differs}' if parsed else f'{len(wanted)} settings parsed as planned'}; {told}")


def _options(script: str) -> list[str]:
    return shlex.split(script.partition("options=(\n")[2].rpartition("\n)\n")[0], comments=True)


def _sglang(plans: Mapping[str, Any], wheel: str | None) -> None:
    if wheel is None:
        print("SGLang: skipped, no --sglang WHEEL (pip download --no-deps sglang)")
        return
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"srt/(server_args|arg_groups/).*\.?py$", name)]
        source = "\n".join(archive.read(name).decode() for name in names)
    known = set(re.findall(r"^    ([a-z][a-z_0-9]*): A\[", source, flags=re.M)) | set(
        re.findall(r'"--([a-z-]+)"', source)
    )
    for plan, made in plans.items():
        words = [word for word in _options(latfit.export(made, "sglang").files["sglang.sh"]) if word.startswith("--")]
        missing = [w for w in words if not {w[2:], w[2:].replace("-", "_")} & known]
        print(f"SGLang, {Path(wheel).name.split('-')[1]}, {plan}: {len(words)} options, unknown: {missing or 'none'}")


@dataclass(frozen=True)
class Case:
    """A load of batches. steps: what the stand-ins take, by path: launch, slope in ms, whether exponential."""

    name: str
    paths: Mapping[str, str]
    steps: Mapping[str, tuple[float, float, int]]
    sla: str
    rate: float
    model: str


BATCHES = {"gpu": "launch=40ms,slope=1ms,max_batch=64"}
BOTH = {"amx": "p50=13.863ms", "gpu": "launch=120ms,slope=0.5ms"}
OF_BATCHES = {"gpu": (40.0, 1.0, 0)}
CASES = (
    Case("greedy", BATCHES, OF_BATCHES, "250ms", 100.0, "gpu"),
    Case("amortised", BATCHES, OF_BATCHES, "250ms", 100.0, "gpu-batched"),
    Case("T_cut", BOTH, {"gpu": (120.0, 0.5, 0), "amx": (20.0, 0.0, 1)}, "200ms", 40.0, "router.py"),
)


def _triton(python: str | None, seconds: float) -> None:
    if python is None:
        print("Triton: skipped, no --triton PYTHON (of an environment with nvidia-pytriton)")
        return
    for case in CASES:
        plan = latfit.plan(case.paths, case.sla, f"{case.rate:g}/s")
        found = latfit.export(plan, "triton")
        with tempfile.TemporaryDirectory() as scratch:
            repository = _repository(found, case, Path(scratch))
            done = subprocess.run(
                [python, str(HERE / "triton_probe.py"), str(repository), case.model, str(case.rate), str(seconds), "1"],
                capture_output=True, text=True, timeout=seconds + 180, check=False,
            )  # fmt: skip
        if done.returncode:
            print(f"Triton, {case.name}: FAILED: {(done.stderr.splitlines() or ['no output'])[-1][:300]}")
            continue
        _beside_the_plan(case, plan.to_json(), found, json.loads(done.stdout.splitlines()[-1]))


def _repository(found: Exported, case: Case, folder: Path) -> Path:
    """The exported files with stand-ins in the place of models, all on the CPU."""
    repository = folder / "models"
    for name, text in found.files.items():
        place = folder / name if name == "router.py" else repository / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name == "router.py":
            place.write_text(text)
            continue
        launch, slope, drawn = case.steps[name.partition("/")[0].removesuffix("-batched")]
        values = {"launch_ms": launch, "slope_ms": slope, "exponential": drawn}
        more = ['backend: "python"', 'input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]']
        more.append('output [ { name: "BATCH" data_type: TYPE_INT32 dims: [ 1 ] } ]')
        more += [f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}' for k, v in values.items()]
        place.write_text("\n".join([text.replace("KIND_GPU", "KIND_CPU"), *more, ""]))
        code = place.parent / "1" / "model.py"
        code.parent.mkdir()
        code.write_text((HERE / "stand_in.py").read_text())
    return repository


def _beside_the_plan(case: Case, plan: Mapping[str, Any], found: Exported, seen: Mapping[str, Any]) -> None:
    """Percentiles and steps as planned, as simulated, as the server made them."""
    kind = {"greedy": "greedy batches", "amortised": "amortised batches", "T_cut": "T_cut"}[case.name]
    row = next(each for each in plan["strategies"] if each["kind"] == kind)
    settings: dict[str, Any] = {}
    policy: Literal["cutoff", "marginal-cost", "gpu-only"] = "gpu-only"
    if case.name == "T_cut":
        policy, settings = "cutoff", {"t_cut": f"{row['T_cut_ms']}ms"}
    elif case.name == "amortised":
        delay = found.settings["gpu-batched"]["max_queue_delay_microseconds"] / 1e3
        policy, settings = "marginal-cost", {"longest": f"{delay}ms"}
    simulated = latfit.simulate(case.paths, f"{case.rate:g}/s", policy, settings=settings).to_json()["runs"][0]
    latency = simulated["latency_ms"]
    print(
        f"Triton, {case.name}, {seen['requests']} requests at {seen['rate_per_s']:.1f}/s: p99 response"
        f" {row['percentile_ms']:.0f} ms planned, {latency['p99']:.0f} simulated with these settings,"
        f" {seen['p99_ms']:.0f} measured (mean {latency['mean']:.0f} and {seen['mean_ms']:.0f},"
        f" p50 {latency['p50']:.0f} and {seen['p50_ms']:.0f}); settings {found.settings}"
    )
    print(f"  simulated: share by path {simulated['share']}, batch sizes {simulated['batch_size']}")
    for name, each in seen["models"].items():
        if not each["requests"]:
            continue
        steps = {int(size): count for size, count in each["steps"].items()}
        count = sum(steps.values())
        mean = sum(size * n for size, n in steps.items()) / max(count, 1)
        share = sum(size * n for size, n in steps.items()) / max(
            sum(int(s) * n for other in seen["models"].values() for s, n in other["steps"].items()), 1
        )
        print(
            f"  {name}: {count} steps of {min(steps)} to {max(steps)}, mean {mean:.2f}; share of requests {share:.3f};"
            f" in Triton's queue {each['mean_queue_ms']:.1f} ms on average"
        )
