"""LLMServingSim 2's kernel tables (microseconds): `attention.csv`, with `dense.csv` and `per_sequence.csv` beside it.

One line of `attention.csv` is one step: a prefill chunk, some decode requests, or both, with the cached tokens they
read. Its time is put together as the simulator does it: every layer has its attention, and each dense operator at the
step's tokens (two norms, the rest once); the embedding and the final norm come once, as do the operators that work on
one token a sequence. Between measured points times are interpolated; beyond the last one T is NaN. The tables measure
one layer and leave the number of layers out: it comes from the model's name in `meta.yaml`. Communication between
devices is not in these tables.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.row_builder import no_steps, refuse_table_options
from latfit.trace.readers.source import Source, open_source
from latfit.trace.readers.text import Tally, has_columns, numbers, read_delimited, texts
from latfit.trace.table import Array, Trace
from latfit.units import MS_PER_UNIT


@dataclass(frozen=True)
class ModelShape:
    """A published model: its name, layers, and the sizes by which a table of one layer can be told."""

    name: str
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int


KNOWN_MODELS: tuple[ModelShape, ...] = (
    ModelShape("Llama-2-7b", 32, 4096, 11008, 32, 32, 32000),
    ModelShape("Llama-2-13b", 40, 5120, 13824, 40, 40, 32000),
    ModelShape("Llama-2-70b", 80, 8192, 28672, 64, 8, 32000),
    ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128256),
    ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256),
    ModelShape("Llama-3-70B", 80, 8192, 28672, 64, 8, 128256),
    ModelShape("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128256),
    ModelShape("CodeLlama-34b", 48, 8192, 22016, 64, 8, 32000),
    ModelShape("internlm-20b", 60, 5120, 13824, 40, 40, 103168),
    ModelShape("internlm2-20b", 48, 6144, 16384, 48, 8, 92544),
    ModelShape("phi-2", 32, 2560, 10240, 32, 32, 51200),
    ModelShape("Qwen-72B", 80, 8192, 24576, 64, 64, 152064),
    ModelShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 151936),
    ModelShape("Qwen3-32B", 64, 5120, 25600, 64, 8, 151936),
)


def model_of_shape(sizes: tuple[float, float, float, float], vocabulary: float) -> ModelShape | None:
    """The model of these (embedding, feed-forward, heads, KV heads); the vocabulary, often padded, parts two of one
    shape.
    """
    fitting = [m for m in KNOWN_MODELS if (m.embedding, m.feed_forward, m.heads, m.kv_heads) == sizes]
    return min(fitting, key=lambda m: abs(m.vocabulary - vocabulary), default=None)


def model_of_name(name: str) -> ModelShape | None:
    """The model whose name the last part of `name` starts with (`meta-llama/Llama-3.1-8B-Instruct`)."""
    plain = name.rpartition("/")[2].casefold().removeprefix("meta-")
    fitting = [m for m in KNOWN_MODELS if plain.startswith(m.name.casefold())]
    return max(fitting, key=lambda m: len(m.name), default=None)


ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
OPERATORS = (("layer", "tokens", "time_us"), ("layer", "sequences", "time_us"))
ONCE_A_STEP = ("embedding", "final_layernorm")
TWICE_A_LAYER = ("layernorm",)


def recognises(head: bytes) -> bool:
    return any(has_columns(head, *names) for names in (ATTENTION, *OPERATORS))


def read(source: Source, options: Options) -> Trace:
    """One step a line of `attention.csv`, in file order."""
    refuse_table_options(options, source, READER.name)
    if not has_columns(source.head, *ATTENTION):
        raise BadInput(
            "holds times of single operators, not of steps",
            where=source.name,
            remedy="Give the attention.csv of the same folder: this table is read with it.",
        )
    table = read_delimited(source)
    chunk, past, decode, decode_past, attention_us = (numbers(table.columns[name]) for name in ATTENTION)
    if not len(chunk):
        raise no_steps(source, f"the columns {', '.join(ATTENTION)}", Tally(bad=table.bad_lines))
    facts = _facts(source)
    layers = _layers(facts.get("model", ""), source)
    prefill = (chunk > 0).astype(np.float64)
    B, S = prefill + decode, chunk + decode
    step_us = layers * attention_us + _dense_us(source, S, layers) + _per_sequence_us(source, B)
    found: dict[str, Array] = {
        "B": B,
        "S": S,
        "T_ms": step_us * MS_PER_UNIT["us"],
        "prefill_requests": prefill,
        "prefill_tokens": chunk,
        "context_tokens": past + decode * decode_past,
        "prefill_context_tokens": past,
    }
    found |= {name: np.array([facts[name]] * len(B), dtype=object) for name in ("hardware", "model") if name in facts}
    if "tp" in facts:
        found["tp"] = np.full(len(B), int(facts["tp"]))
    known = {"format": READER.name, "layers": layers, "beyond_tables": int(np.isnan(step_us).sum())}
    return Trace(
        found, {**known, "note": "without communication", "host_time": "none", **Tally(bad=table.bad_lines).facts()}
    )


def _dense_us(source: Source, S: FloatArray, layers: int) -> FloatArray:
    total = np.zeros_like(S)
    for operator, (tokens, time_us) in _curves(source, "dense.csv", "tokens").items():
        times = 1 if operator in ONCE_A_STEP else layers * (1 + (operator in TWICE_A_LAYER))
        total += times * _between(S, tokens, time_us)
    return total


def _per_sequence_us(source: Source, B: FloatArray) -> FloatArray:
    total = np.zeros_like(B)
    for sequences, time_us in _curves(source, "per_sequence.csv", "sequences").values():
        total += _between(B, sequences, time_us)
    return total


def _between(at: FloatArray, known: FloatArray, time_us: FloatArray) -> FloatArray:
    return np.asarray(np.interp(at, known, time_us, left=np.nan, right=np.nan))


def _curves(source: Source, name: str, by: str) -> Mapping[str, tuple[FloatArray, FloatArray]]:
    """{operator: (sizes in ascending order, times)} of a table beside the source. Raises BadInput without it."""
    beside = source.path.parent / name
    if (source.path.parent / "moe.csv").exists():
        raise BadInput(
            "belongs to a mixture of experts, whose steps depend on the experts that were chosen",
            where=source.name,
            remedy="Give a trace of measured steps of that model instead.",
        )
    if not beside.is_file() or not has_columns(open_source(beside).head, "layer", by, "time_us"):
        raise BadInput(
            f"holds the attention kernels alone: there is no {name} beside it",
            where=source.name,
            remedy="Keep attention.csv, dense.csv, per_sequence.csv and meta.yaml in their folders.",
        )
    columns = read_delimited(open_source(beside)).columns
    operators, sizes, time_us = texts(columns["layer"]), numbers(columns[by]), numbers(columns["time_us"])
    order = np.argsort(sizes, kind="stable")
    return {
        operator: (sizes[order][rows], time_us[order][rows])
        for operator in dict.fromkeys(operators.tolist())
        if (rows := operators[order] == operator).any()
    }


def _facts(source: Source) -> dict[str, str]:
    """Model and hardware from meta.yaml in this folder or the one above; tensor parallelism from the folder's name."""
    facts: dict[str, str] = {}
    folder = source.path.parent
    for meta in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        for key, value in re.findall(r"^(model|hardware):[ \t]*(\S.*?)[ \t]*$", _content(meta), re.MULTILINE):
            facts.setdefault(key, value.strip("'\""))
    if told := re.fullmatch(r"tp(\d{1,4})", folder.name):
        facts["tp"] = told.group(1)
    return facts


def _content(path: Path) -> str:
    return open_source(path).head.decode("utf-8", errors="replace") if path.is_file() else ""


def _layers(model: str, source: Source) -> int:
    told = model_of_name(model)
    if told is None:
        known = f"{model!r} is not a model it knows" if model else "there is no meta.yaml with the model's name"
        raise BadInput(
            f"measures one layer, and the number of layers is not known: {known}",
            where=source.name,
            remedy="Write the name of the published model in meta.yaml (model: meta-llama/Llama-3.1-8B).",
        )
    return told.layers


READER = Reader("llmservingsim", "LLMServingSim's attention.csv", recognises, read, path="gpu")
