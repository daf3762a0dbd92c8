"""All engines. A new one is a module of this package and a place in this list."""

from collections.abc import Iterable, Mapping
from pathlib import PurePath

from latfit.engines.engine import Engine
from latfit.engines.llama_cpp import LLAMA_CPP
from latfit.engines.sglang import SGLANG
from latfit.engines.tensorrt_llm import TENSORRT_LLM
from latfit.engines.tgi import TGI
from latfit.engines.triton import TRITON
from latfit.engines.vllm import VLLM

ENGINES = (VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP, TGI, TRITON)


def engine_named(name: str) -> Engine:
    return next(engine for engine in ENGINES if engine.name == name)


def engine_started_by(command: Iterable[str]) -> Engine | None:
    """Return the engine whose program, Python package or image a command names."""
    for word in command:
        own = PurePath(word).name.lower()
        for engine in ENGINES:
            if own.startswith(tuple({engine.name.lower(), *engine.program} - {"python3", "-m", "serve"})):
                return engine
    return None


RECORDED = ("vllm", "sglang", "tensorrt_llm")  # names in provenances whose model is that of the server

BY_KEY = {engine.key: engine for engine in ENGINES if engine.key}
"""Engines that plans have settings for."""


def engine_key(systems: Iterable[Mapping[str, str]]) -> str:
    """Return the key of the engine that traces name, else vLLM's."""
    for system in systems:
        plain = "".join(letter for letter in system.get("engine", "").lower() if letter.isalnum())
        for engine in BY_KEY.values():
            if plain in (engine.key, "".join(filter(str.isalnum, engine.name.lower()))):
                return engine.key
    return VLLM.key


def graph_sizes_option(engine: str) -> str:
    return next((each.graph_sizes for each in ENGINES if each.name.lower() == engine.lower()), "")


def describe_engines() -> str:
    *names, last = (f"{each.name} ({each.metrics_help})" if each.metrics_help else each.name for each in ENGINES)
    return f"{', '.join(names)} or {last}"


def setting_names() -> dict[str, str]:
    return {theirs: ours for engine in ENGINES for theirs, ours in engine.settings.items()}
