"""Measured tables of LLM simulators: splitwise-sim's grid, Vidur's `mlp.csv`, LLMServingSim 2's kernel tables.

Vidur and LLMServingSim measure the operators of one layer; a step is their sum over all layers.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.engines import step_reader
from latfit.trace.readers.source import Source, open_source
from latfit.trace.readers.text import Tally, has_columns, header_of, numbers, read_delimited, texts
from latfit.trace.table import Array
from latfit.units import MS_PER_UNIT

LAYERS: Mapping[str, int] = {
    "Llama-2-7b": 32,
    "Llama-2-13b": 40,
    "Llama-2-70b": 80,
    "Llama-3-8B": 32,
    "Llama-3.1-8B": 32,
    "Llama-3-70B": 80,
    "Llama-3.1-70B": 80,
    "CodeLlama-34b": 48,
    "internlm-20b": 60,
    "internlm2-20b": 48,
    "phi-2": 32,
    "Qwen-72B": 80,
    "Qwen3-8B": 36,
    "Qwen3-32B": 64,
}
"""Layers of published models by the beginning of their names."""


def layers_of(name: str) -> int | None:
    """Return the layers of a model such as `meta-llama/Llama-3.1-8B-Instruct`; None if it is not known."""
    plain = name.rpartition("/")[2].casefold().removeprefix("meta-")
    fitting = [known for known in LAYERS if plain.startswith(known.casefold())]
    return LAYERS[max(fitting, key=len)] if fitting else None


# ---------------------------------------------------------------------------------------------------- splitwise-sim

GRID = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")


def splitwise_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return two steps per line of `perf_model.csv`, in milliseconds: prefill, and the mean decode step.

    The context of the decode step is that in the middle of the output.
    """
    facts["aggregated"] = "mean decode step"
    found = read_delimited(source, tally)
    if not set(GRID) <= set(found):
        return {}
    prompt, B, output, prefill_ms, decode_ms = (numbers(found[name]) for name in GRID)
    zero = np.zeros_like(B)
    pairs = {
        "B": (B, B),
        "S": (B * prompt, B),
        "T_ms": (prefill_ms, decode_ms),
        "prefill_requests": (B, zero),
        "prefill_tokens": (B * prompt, zero),
        "context_tokens": (zero, B * (prompt + output / 2)),
    }
    columns: dict[str, Array] = {name: np.stack(pair, axis=1).ravel() for name, pair in pairs.items()}
    columns["phase"] = np.array(["prefill", "decode"] * len(B), dtype=object)
    columns |= {name: np.repeat(texts(found[name]), 2) for name in ("hardware", "model") if name in found}
    if "tensor_parallel" in found:
        columns["tp"] = np.repeat(found["tensor_parallel"], 2)
    return columns


SPLITWISE = step_reader(
    "splitwise",
    "the measured grid of splitwise-sim",
    lambda head: has_columns(head, *GRID),
    splitwise_steps,
    f"the columns {', '.join(GRID)}",
)

# ------------------------------------------------------------------------------------------------------------ Vidur

PREFIX, STATISTIC = "time_stats.", ".median"


def vidur_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return one step per line of `mlp.csv`: the medians, in milliseconds, of all operators but attention.

    The embedding counts once, every other operator once per layer, `add` twice. An operator with an empty cell does not
    exist in that model. T is the part of a step that depends on S alone; B is 1.
    """
    table = read_delimited(source, tally)
    operators = [name for name in table if name.startswith(PREFIX) and name.endswith(STATISTIC)]
    if "num_tokens" not in table or not operators:
        raise BadInput(
            "has times of operators, but not by num_tokens",
            remedy="Give Vidur's mlp.csv; its attention.csv holds kernels, not steps.",
        )
    column = {name: numbers(values) for name, values in table.items()}
    S = column["num_tokens"]
    labels = _compute_labels(source)
    layers = next((column[name] for name in ("n_layer", "num_layers") if name in column), None)
    if layers is None:
        layers = np.full(len(S), layers_of(labels.get("model", "")) or np.nan, dtype=np.float64)
    if not (np.isfinite(layers).all() and (layers >= 1).all()):
        raise BadInput(
            "measures one layer of a model whose number of layers is not known",
            remedy="Add a column n_layer with the number of layers of the model, or keep the file in Vidur's folders,"
            " compute/HARDWARE/ORGANISATION/MODEL.",
        )
    total, known = np.zeros_like(layers), np.zeros(len(layers), dtype=bool)
    for name in operators:
        operator = name.removeprefix(PREFIX).removesuffix(STATISTIC)
        calls = np.ones_like(layers) if operator == "emb" else layers * (2 if operator == "add" else 1)
        known |= np.isfinite(column[name])
        total += calls * np.nan_to_num(column[name], nan=0.0)
    found: dict[str, Array] = {"B": np.ones_like(S), "S": S, "T_ms": np.where(known, total, np.nan)}
    if "num_tensor_parallel_workers" in table:
        found["tp"] = table["num_tensor_parallel_workers"]
    facts |= {"statistic": "median", "layers": sorted({int(n) for n in layers.tolist()})}
    facts |= {"note": "without attention", "host_time": "none"}
    found |= {name: np.full(len(S), label, dtype=object) for name, label in labels.items()}
    return found


def _compute_labels(source: Source) -> dict[str, str]:
    """Take hardware and model from the folders `compute/<hardware>/<organisation>/<model>/`."""
    folders = source.path.parts[-5:-1]
    return {"hardware": folders[1], "model": folders[3]} if len(folders) == 4 and folders[0] == "compute" else {}


VIDUR = step_reader(
    "vidur",
    "Vidur's mlp.csv",
    lambda head: any(name.startswith(PREFIX) for name in header_of(head)),
    vidur_steps,
    "a line for each number of tokens",
)

# ---------------------------------------------------------------------------------------------------- LLMServingSim

ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
OPERATORS = (("layer", "tokens", "time_us"), ("layer", "sequences", "time_us"))


def llmservingsim_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return one step per line of `attention.csv`, with `dense.csv` and `per_sequence.csv` beside it (microseconds).

    Each layer has its attention and each dense operator once at the step's tokens, `layernorm` twice; embedding, final
    norm and the operators per sequence count once. Times are interpolated, and NaN beyond the tables. The number of
    layers comes from the model's name in `meta.yaml`.
    """
    if not has_columns(source.head, *ATTENTION):
        raise BadInput(
            "holds times of single operators, not of steps",
            remedy="Give the attention.csv of the same folder: this table is read with it.",
        )
    table = read_delimited(source, tally)
    chunk, past, decode, decode_past, attention_us = (numbers(table[name]) for name in ATTENTION)
    labels = _folder_labels(source)
    model = labels.get("model", "")
    layers = layers_of(model)
    if layers is None:
        reason = f"{model!r} is not a model it knows" if model else "there is no meta.yaml with the model's name"
        raise BadInput(
            f"measures one layer, and the number of layers is not known: {reason}",
            remedy="Write the name of the published model in meta.yaml (model: meta-llama/Llama-3.1-8B).",
        )
    prefill = (chunk > 0).astype(np.float64)
    B, S = prefill + decode, chunk + decode
    step_us = layers * attention_us
    for operator, (tokens, time_us) in _time_curves(source, "dense.csv", "tokens").items():
        once = operator in ("embedding", "final_layernorm")
        calls = 1 if once else layers * (2 if operator == "layernorm" else 1)
        step_us = step_us + calls * np.interp(S, tokens, time_us, left=np.nan, right=np.nan)
    for sequences, time_us in _time_curves(source, "per_sequence.csv", "sequences").values():
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
    if "tp" in labels:
        found["tp"] = np.full(len(B), int(labels["tp"]))
    facts |= {"layers": layers, "beyond_tables": int(np.isnan(step_us).sum())}
    facts |= {"note": "without communication", "host_time": "none"}
    return found


def _time_curves(source: Source, name: str, by: str) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return {operator: (ascending sizes, times)} of a table beside the source. Raises BadInput without it."""
    beside = source.path.parent / name
    if (source.path.parent / "moe.csv").exists():
        raise BadInput(
            "belongs to a mixture of experts, whose steps depend on the experts that were chosen",
            remedy="Give a trace of measured steps of that model instead.",
        )
    if not beside.is_file() or not has_columns(open_source(beside).head, "layer", by, "time_us"):
        raise BadInput(
            f"holds the attention kernels alone: there is no {name} beside it",
            remedy="Keep attention.csv, dense.csv, per_sequence.csv and meta.yaml in their folders.",
        )
    columns = read_delimited(open_source(beside), Tally())
    operators, sizes, time_us = texts(columns["layer"]), numbers(columns[by]), numbers(columns["time_us"])
    order = np.argsort(sizes, kind="stable")
    return {
        operator: (sizes[order][rows], time_us[order][rows])
        for operator in dict.fromkeys(operators.tolist())
        if (rows := operators[order] == operator).any()
    }


def _folder_labels(source: Source) -> dict[str, str]:
    """Take model and hardware from meta.yaml here or in the parent folder, tp from the folder's name."""
    labels: dict[str, str] = {}
    folder = source.path.parent
    for meta in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        content = meta.read_text(errors="replace") if meta.is_file() else ""
        for key, value in re.findall(r"^(model|hardware):[ \t]*(\S.*?)[ \t]*$", content, re.MULTILINE):
            labels.setdefault(key, value.strip("'\""))
    if found := re.fullmatch(r"tp(\d{1,4})", folder.name):
        labels["tp"] = found.group(1)
    return labels


LLMSERVINGSIM = step_reader(
    "llmservingsim",
    "LLMServingSim's attention.csv",
    lambda head: any(has_columns(head, *names) for names in (ATTENTION, *OPERATORS)),
    llmservingsim_steps,
    f"the columns {', '.join(ATTENTION)}",
)
