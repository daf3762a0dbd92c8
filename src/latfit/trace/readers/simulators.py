"""Measured tables of LLM simulators: splitwise-sim's grid, Vidur's `mlp.csv`, LLMServingSim 2's kernel tables.

Vidur and LLMServingSim measure the operators of one layer; a step is their sum over all layers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.engines import grid_steps, step_reader
from latfit.trace.readers.source import (
    Source,
    Tally,
    has_columns,
    header_of,
    numbers,
    open_source,
    read_delimited,
    texts,
)
from latfit.trace.table import Array
from latfit.units import MS_PER_UNIT

NAMES_BY_LAYERS = {
    32: ("Llama-2-7b", "Llama-3-8B", "Llama-3.1-8B", "phi-2"),
    36: ("Qwen3-8B",),
    40: ("Llama-2-13b",),
    48: ("CodeLlama-34b", "internlm2-20b"),
    60: ("internlm-20b",),
    64: ("Qwen3-32B",),
    80: ("Llama-2-70b", "Llama-3-70B", "Llama-3.1-70B", "Qwen-72B"),
}
"""Layers of published models by the beginning of their names."""


def _layers_of(model: str) -> int:
    """Return the layers of a model such as `meta-llama/Llama-3.1-8B-Instruct`. Raises BadInput if unknown."""
    plain = model.rpartition("/")[2].casefold().removeprefix("meta-")
    for layers, names in NAMES_BY_LAYERS.items():
        if plain.startswith(tuple(name.casefold() for name in names)):
            return layers
    raise BadInput(
        f"measures one layer of a model, and its number of layers is not known (model: {model or 'not named'})",
        remedy="Name a published model: in LLMServingSim's meta.yaml (model: meta-llama/Llama-3.1-8B), or by"
        " Vidur's folders, compute/HARDWARE/ORGANISATION/MODEL. Or add a column n_layer to Vidur's table.",
    )


GRID = ("batch_size", "prompt_size", "token_size", "prompt_time", "token_time")


def splitwise_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return two steps per line of `perf_model.csv`, in milliseconds: prefill, and the mean decode step."""
    facts["aggregated"] = "mean decode step"
    found = read_delimited(source, tally)
    if not set(GRID) <= set(found):
        return {}
    columns = grid_steps(*(numbers(found[name]) for name in GRID))
    columns |= {name: np.repeat(texts(found[name]), 2) for name in ("hardware", "model") if name in found}
    if "tensor_parallel" in found:
        columns["tp"] = np.repeat(found["tensor_parallel"], 2)
    return columns


PREFIX, STATISTIC = "time_stats.", ".median"


def vidur_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return one step per line of `mlp.csv`: the medians, in milliseconds, of all operators but attention.

    The embedding counts once, every other operator once per layer, `add` twice. T depends on S alone; B is 1.
    """
    table = read_delimited(source, tally)
    operators = [name for name in table if name.startswith(PREFIX) and name.endswith(STATISTIC)]
    if "num_tokens" not in table or not operators:
        remedy = "Give Vidur's mlp.csv; its attention.csv holds kernels, not steps."
        raise BadInput("has times of operators, but not by num_tokens", remedy=remedy)
    column = {name: numbers(values) for name, values in table.items()}
    S, folders = column["num_tokens"], source.path.parts[-5:-1]
    labels = {"hardware": folders[1], "model": folders[3]} if len(folders) == 4 and folders[0] == "compute" else {}
    layers = next((column[name] for name in ("n_layer", "num_layers") if name in column), None)
    if layers is None:
        layers = np.full(len(S), float(_layers_of(labels.get("model", ""))))
    total, is_measured = np.zeros_like(layers), np.zeros(len(layers), dtype=bool)
    for name in operators:
        operator = name.removeprefix(PREFIX).removesuffix(STATISTIC)
        calls = np.ones_like(layers) if operator == "emb" else layers * (2 if operator == "add" else 1)
        is_measured |= np.isfinite(column[name])
        total += calls * np.nan_to_num(column[name], nan=0.0)
    found: dict[str, Array] = {"B": np.ones_like(S), "S": S, "T_ms": np.where(is_measured, total, np.nan)}
    if "num_tensor_parallel_workers" in table:
        found["tp"] = table["num_tensor_parallel_workers"]
    facts |= {"statistic": "median", "layers": [int(n) for n in np.unique(layers).tolist() if np.isfinite(n)]}
    facts |= {"note": "without attention", "host_time": "none"}
    return found | {name: np.full(len(S), label, dtype=object) for name, label in labels.items()}


ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
OPERATORS = (("layer", "tokens", "time_us"), ("layer", "sequences", "time_us"))


def llmservingsim_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return one step per line of `attention.csv`, with `dense.csv` and `per_sequence.csv` beside it (microseconds).

    Each layer has its attention and each dense operator once at the step's tokens, `layernorm` twice. Times are
    interpolated, and NaN beyond the tables.
    """
    folder = source.path.parent
    if not has_columns(source.head, *ATTENTION):
        remedy = "Give the attention.csv of the same folder: this table is read with it."
        raise BadInput("holds times of single operators, not of steps", remedy=remedy)
    if (folder / "moe.csv").exists():
        remedy = "Give a trace of measured steps of that model instead."
        raise BadInput("is of a mixture of experts, whose steps depend on the experts that were chosen", remedy=remedy)
    table = read_delimited(source, tally)
    chunk, past, decode, decode_past, attention_us = (numbers(table[name]) for name in ATTENTION)
    labels = _meta_labels(folder)
    layers = _layers_of(labels.get("model", ""))
    prefill = (chunk > 0).astype(np.float64)
    B, S = prefill + decode, chunk + decode
    step_us = layers * attention_us
    for operator, tokens, time_us in _time_curves(folder, "dense.csv", "tokens"):
        once = operator in ("embedding", "final_layernorm")
        calls = 1 if once else layers * (2 if operator == "layernorm" else 1)
        step_us = step_us + calls * np.interp(S, tokens, time_us, left=np.nan, right=np.nan)
    for _, sequences, time_us in _time_curves(folder, "per_sequence.csv", "sequences"):
        step_us = step_us + np.interp(B, sequences, time_us, left=np.nan, right=np.nan)
    found: dict[str, Array] = {
        "B": B,
        "S": S,
        "T_ms": step_us * MS_PER_UNIT["us"],
        "prefill_requests": prefill,
        "prefill_tokens": chunk,
        "context_tokens": past + decode * decode_past,
        "prefill_context_tokens": past,
    }
    found |= {name: np.full(len(B), labels[name], dtype=object) for name in ("hardware", "model") if name in labels}
    if tp := re.fullmatch(r"tp(\d{1,4})", folder.name):
        found["tp"] = np.full(len(B), int(tp[1]))
    facts |= {"layers": layers, "beyond_tables": int(np.isnan(step_us).sum())}
    facts |= {"note": "without communication", "host_time": "none"}
    return found


def _time_curves(folder: Path, name: str, by: str) -> list[tuple[str, FloatArray, FloatArray]]:
    if not (folder / name).is_file() or not has_columns(open_source(folder / name).head, "layer", by, "time_us"):
        raise BadInput(
            f"holds the attention kernels alone: there is no {name} beside it",
            remedy="Keep attention.csv, dense.csv, per_sequence.csv and meta.yaml in their folders.",
        )
    columns = read_delimited(open_source(folder / name), Tally())
    order = np.argsort(numbers(columns[by]), kind="stable")
    operators, sizes, time_us = (
        texts(columns["layer"])[order],
        numbers(columns[by])[order],
        numbers(columns["time_us"])[order],
    )
    return [(name, sizes[operators == name], time_us[operators == name]) for name in dict.fromkeys(operators.tolist())]


def _meta_labels(folder: Path) -> dict[str, str]:
    """Take model and hardware from meta.yaml here or in the parent folder."""
    labels: dict[str, str] = {}
    for meta in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        content = meta.read_text(errors="replace") if meta.is_file() else ""
        for key, value in re.findall(r"^(model|hardware):[ \t]*(\S.*?)[ \t]*$", content, re.MULTILINE):
            labels.setdefault(key, value.strip("'\""))
    return labels


SPLITWISE = step_reader(
    "splitwise", "the measured grid of splitwise-sim", lambda head: has_columns(head, *GRID), splitwise_steps
)
VIDUR = step_reader(
    "vidur", "Vidur's mlp.csv", lambda head: any(name.startswith(PREFIX) for name in header_of(head)), vidur_steps
)
LLMSERVINGSIM = step_reader(
    "llmservingsim",
    "LLMServingSim's attention.csv",
    lambda head: any(has_columns(head, *names) for names in (ATTENTION, *OPERATORS)),
    llmservingsim_steps,
)
