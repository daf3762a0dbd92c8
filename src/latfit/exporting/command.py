"""What starts an engine with a plan's settings, in one line: the engine that the plan's steps are of, else vLLM."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from latfit.exporting.render import flag, yaml_value

TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "llamacpp": "llama.cpp", "triton": "Triton"}
"""Engines whose steps a trace may hold, as plans call them and as people do."""

AS_SAID = {"tensorrtllm": "trtllm"}
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python3", "-m", "sglang.launch_server"),
    "llamacpp": ("llama-server",),
}
MODEL_OPTIONS: Mapping[str, tuple[str, ...]] = {"sglang": ("--model-path",), "llamacpp": ("--model",)}
REQUEST_LIMIT = {
    "vllm": "max_num_seqs",
    "sglang": "max_running_requests",
    "trtllm": "max_batch_size",
    "llamacpp": "parallel",
    "triton": "max_batch_size",
}
"""What engines call the limit of requests in a step."""

KT = "kt_gpu_prefill_token_threshold"
"""Of KTransformers' build of SGLang."""

FIRST_COME = "fcfs"
BY_PRIORITY = ("vllm", "sglang")


def engine_key(systems: Iterable[Mapping[str, str]]) -> str:
    """The engine that traces name, as plans call it; vLLM, which most use, where they name none that is known."""
    for system in systems:
        plain = "".join(letter for letter in system.get("engine", "").lower() if letter.isalnum())
        if AS_SAID.get(plain, plain) in TITLES:
            return AS_SAID.get(plain, plain)
    return "vllm"


def program(key: str, model: str | None = None) -> tuple[str, ...]:
    """The words that start a server, of a model where one is given."""
    return PROGRAMS[key] if model is None else (*PROGRAMS[key], *MODEL_OPTIONS.get(key, ()), model)


def start_line(
    key: str, engines: Mapping[str, Mapping[str, Any]], order: str = FIRST_COME, model: str | None = None
) -> str:
    """The command line, the settings of an engine that takes them from a file, or why there are none. engines: the
    plan's settings.  order: of requests.  model: a word that stands for it."""
    if order != FIRST_COME and not (order == "priority" and key in BY_PRIORITY):
        return f"no setting of {TITLES[key]} does this, it does not serve requests by {order}"
    if key not in engines:
        return f"no setting of {TITLES[key]} does this, it does not batch so (latfit export has other engines)"
    if key not in PROGRAMS:
        told = ", ".join(f"{name}: {_value(value)}" for name, value in engines[key].items())
        return f"{told} (latfit export {key} writes the file)"
    found = {name: value for name, value in engines[key].items() if name != KT}
    return shlex.join([*program(key, model), *(word for name, value in found.items() for word in flag(name, value))])


def with_flags(command: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """A command with these options in place of those that it has under the same names."""
    kept: list[str] = []
    skip = False
    for word in command:
        name, given, _ = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        plain = name.removeprefix("no_")
        if skip and not word.startswith("-"):
            skip = False
            continue
        skip = False
        if word.startswith("--") and (name in settings or plain in settings):
            skip = not given and plain in settings and not isinstance(settings[plain], bool)
            continue
        kept.append(word)
    return [*kept, *(word for name, value in settings.items() for word in flag(name, value))]


def _value(value: Any) -> str:
    return str(value) if isinstance(value, list) else yaml_value(value)
