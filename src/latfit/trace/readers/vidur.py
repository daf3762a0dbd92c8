"""Vidur's `mlp.csv`: times of the operators of one layer outside attention (milliseconds), summed to a whole step.

A step is the embedding once and every other operator once a layer, except `add`, of which a layer has two: one after
attention, one after the feed-forward part. An operator whose cells are empty in a row is one the model does not have.
The medians are summed. Attention is not in this table: T is the part of a step that depends on S alone, and B is 1.
"""

from collections.abc import Mapping

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.llmservingsim import ModelShape, model_of_shape
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.row_builder import no_steps, refuse_table_options
from latfit.trace.readers.source import Source
from latfit.trace.readers.text import Tally, header_of, numbers, read_delimited
from latfit.trace.table import Array, Trace

PREFIX, STATISTIC = "time_stats.", ".median"
ONCE_A_STEP = ("emb",)
TWICE_A_LAYER = ("add",)
LAYERS = ("n_layer", "num_layers")
SHAPE = ("n_embd", "n_expanded_embd", "n_head", "n_kv_head")


def recognises(head: bytes) -> bool:
    return any(name.startswith(PREFIX) for name in header_of(head))


def read(source: Source, options: Options) -> Trace:
    """One step a line in file order. Raises BadInput where the number of layers is not known."""
    refuse_table_options(options, source, READER.name)
    table = read_delimited(source)
    operators = [name for name in table.columns if name.startswith(PREFIX) and name.endswith(STATISTIC)]
    if "num_tokens" not in table.columns or not operators:
        raise BadInput(
            "has times of operators, but not by num_tokens",
            where=source.name,
            remedy="Give Vidur's mlp.csv; its attention.csv holds kernels, not steps.",
        )
    column = {name: numbers(values) for name, values in table.columns.items()}
    S = column["num_tokens"]
    if not len(S):
        raise no_steps(source, "a line for each number of tokens", Tally(bad=table.bad_lines))
    models = _models(column, len(S))
    layers = _layers(column, models, source)
    found: dict[str, Array] = {"B": np.ones_like(S), "S": S, "T_ms": _step_ms(column, operators, layers)}
    if "num_tensor_parallel_workers" in table.columns:
        found["tp"] = table.columns["num_tensor_parallel_workers"]
    found |= _labels(source, models)
    facts = {"format": READER.name, "statistic": "median", "layers": sorted({int(n) for n in layers.tolist()})}
    return Trace(
        found, {**facts, "note": "without attention", "host_time": "none", **Tally(bad=table.bad_lines).facts()}
    )


def _step_ms(column: Mapping[str, FloatArray], operators: list[str], layers: FloatArray) -> FloatArray:
    total = np.zeros_like(layers)
    known = np.zeros(len(layers), dtype=bool)
    for name in operators:
        operator = name.removeprefix(PREFIX).removesuffix(STATISTIC)
        times = np.ones_like(layers) if operator in ONCE_A_STEP else layers * (1 + (operator in TWICE_A_LAYER))
        known |= np.isfinite(column[name])
        total += times * np.nan_to_num(column[name], nan=0.0)
    return np.where(known, total, np.nan)


def _models(column: Mapping[str, FloatArray], rows: int) -> list[ModelShape | None]:
    """The model of each row by its shape; old tables hold several."""
    if any(name not in column for name in SHAPE):
        return [None] * rows
    vocabulary = column.get("vocab_size", np.zeros(rows))
    keys = np.stack([*(column[name] for name in SHAPE), vocabulary], axis=1).tolist()
    told = {key: model_of_shape((key[0], key[1], key[2], key[3]), key[4]) for key in {tuple(key) for key in keys}}
    return [told[tuple(key)] for key in keys]


def _layers(column: Mapping[str, FloatArray], models: list[ModelShape | None], source: Source) -> FloatArray:
    named = next((column[name] for name in LAYERS if name in column), None)
    layers = np.array([np.nan if model is None else model.layers for model in models]) if named is None else named
    if np.isfinite(layers).all() and (layers >= 1).all():
        return np.asarray(layers, dtype=np.float64)
    raise BadInput(
        "measures one layer of a model whose number of layers is not known",
        where=source.name,
        remedy="Add a column n_layer with the number of layers of the model.",
    )


def _labels(source: Source, models: list[ModelShape | None]) -> dict[str, Array]:
    """Hardware and model from the folders `compute/<hardware>/<organisation>/<model>/`, else the model by its shape."""
    rows = len(models)
    folders = source.path.parts[-5:-1]
    if len(folders) == 4 and folders[0] == "compute":
        named = {"hardware": folders[1], "model": folders[3]}
        return {label: np.array([name] * rows, dtype=object) for label, name in named.items()}
    if any(model is not None for model in models):
        return {"model": np.array(["" if model is None else model.name for model in models], dtype=object)}
    return {}


READER = Reader("vidur", "Vidur's mlp.csv", recognises, read, path="gpu")
