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
import math
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
class Step:
    """What a stand-in takes for b requests, ms: launch + slope b, or exponential with mean `launch`."""

    launch: float
    slope: float = 0.0
    drawn: bool = False

    def nominal(self, longer: float = 0.0) -> str:
        """As a path of a plan; with steps that take longer."""
        mean = self.launch + longer
        return f"p50={mean * math.log(2)}ms" if self.drawn else f"launch={mean}ms,slope={self.slope}ms,max_batch=256"


@dataclass(frozen=True)
class Case:
    """A load of batches on paths, and the model that requests are sent to."""

    name: str
    kind: str
    steps: Mapping[str, Step]
    sla: str
    rate: float
    model: str

    def paths(self, longer: Mapping[str, float] | None = None) -> dict[str, str]:
        return {name: step.nominal((longer or {}).get(name, 0.0)) for name, step in self.steps.items()}


ALONE = {"gpu": Step(40.0, 1.0)}
CASES = (
    Case("greedy", "greedy batches", ALONE, "250ms", 100.0, "gpu"),
    Case("amortised", "amortised batches", ALONE, "250ms", 100.0, "gpu-batched"),
    Case("T_cut", "T_cut", {"amx": Step(20.0, drawn=True), "gpu": Step(120.0, 0.5)}, "200ms", 40.0, "router.py"),
)


def _triton(python: str | None, seconds: float) -> None:
    if python is None:
        print("Triton: skipped, no --triton PYTHON (of an environment with nvidia-pytriton)")
        return
    for case in CASES:
        plan = latfit.plan(case.paths(), case.sla, f"{case.rate:g}/s")
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
        step = case.steps[name.partition("/")[0].removesuffix("-batched")]
        values = {"launch_ms": step.launch, "slope_ms": step.slope, "exponential": int(step.drawn)}
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
    row = next(each for each in plan["strategies"] if each["kind"] == case.kind)
    longer = {name.removesuffix("-batched"): _longer(case, name, each) for name, each in seen["models"].items()}
    print(
        f"Triton, {case.name}, {seen['requests']} requests at {seen['rate_per_s']:.1f}/s, settings"
        f" {_brief(found.settings)}: response p99 {row['percentile_ms']:.0f} ms, mean {row['mean_ms']:.0f} as planned"
    )
    for name, told in (
        ("simulated", _simulated(case, row, found, {})),
        ("simulated with the steps as long as they were", _simulated(case, row, found, longer)),
    ):
        latency, sizes = told["latency_ms"], told["batch_size"]
        shares = ", ".join(f"{path} {share:.3f}" for path, share in told["share"].items() if share)
        print(
            f"  {name}: p99 {latency['p99']:.0f} ms, p50 {latency['p50']:.0f}, mean {latency['mean']:.0f};"
            f" batches p50 {sizes['p50']:.0f}, p90 {sizes['p90']:.0f}, p99 {sizes['p99']:.0f}; requests {shares}"
        )
    print(f"  measured: p99 {seen['p99_ms']:.0f} ms, p50 {seen['p50_ms']:.0f}, mean {seen['mean_ms']:.0f}")
    # the router sends the GPU a batch as one request of Triton's: requests are counted by the sizes of steps
    served = {
        name: sum(int(size) * count for size, count in each["steps"].items()) for name, each in seen["models"].items()
    }
    for name, each in seen["models"].items():
        if not each["requests"]:
            continue
        steps = {int(size): count for size, count in each["steps"].items()}
        sizes = sorted(size for size, count in steps.items() for _ in range(count))
        at = [sizes[min(int(len(sizes) * share), len(sizes) - 1)] for share in (0.5, 0.9, 0.99)]
        print(
            f"  {name}: {len(sizes)} steps, batches p50 {at[0]}, p90 {at[1]}, p99 {at[2]}, {sizes[0]} to {sizes[-1]};"
            f" requests {served[name] / sum(served.values()):.3f}; in Triton's queue {each['mean_queue_ms']:.1f} ms on"
            " average;"
            f" steps {longer[name.removesuffix('-batched')]:.1f} ms longer than asked"
        )


def _brief(settings: Mapping[str, Any]) -> str:
    """Of every model, lists by their ends."""
    told = []
    for model, values in settings.items():
        each = {k: f"{v[0]}..{v[-1]}" if isinstance(v, list) else v for k, v in values.items()}
        told.append(f"{model} {each}")
    return "; ".join(told)


def _longer(case: Case, model: str, seen: Mapping[str, Any]) -> float:
    """How much longer steps took than the stand-in was told, ms on average; 0 where the time is drawn."""
    step = case.steps[model.removesuffix("-batched")]
    steps = {int(size): count for size, count in seen["steps"].items()}
    if step.drawn or not steps:
        return 0.0
    took = {int(size): ms for size, ms in seen["took_ms"].items()}
    extra = sum(count * (took[size] - step.launch - step.slope * size) for size, count in steps.items())
    return float(extra / sum(steps.values()))


def _simulated(case: Case, row: Mapping[str, Any], found: Exported, longer: Mapping[str, float]) -> Mapping[str, Any]:
    settings: dict[str, Any] = {}
    policy: Literal["cutoff", "marginal-cost", "gpu-only"] = "gpu-only"
    if case.kind == "T_cut":
        policy, settings = "cutoff", {"t_cut": f"{row['T_cut_ms']}ms"}
    elif case.kind == "amortised batches":
        delay = found.settings[case.model]["max_queue_delay_microseconds"] / 1e3
        policy, settings = "marginal-cost", {"longest": f"{delay}ms"}
    told = latfit.simulate(case.paths(longer), f"{case.rate:g}/s", policy, settings=settings).to_json()
    run: Mapping[str, Any] = told["runs"][0]
    return run
