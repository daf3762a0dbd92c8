"""Shapes of models and steps, and config.json as it is found in the wild."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st

from latfit.errors import BadInput, WrongUsage
from latfit.profiling.devices.numpy_device import random_weights
from latfit.profiling.shapes import (
    PRESETS,
    ModelShape,
    StepShape,
    check_fits,
    from_config,
    model_shape,
    step_flops,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
}


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


class TestStepShape:
    def test_prefill_with_history(self) -> None:
        cell = StepShape(prefill=(10, 20), history=(0, 5))
        assert (cell.B, cell.S, cell.phase) == (2, 30, "prefill")
        assert (cell.context_tokens, cell.prefill_context_tokens, cell.cache_tokens) == (5, 5, 35)

    @pytest.mark.parametrize(
        "arguments",
        [(), (-1, 0, (4,)), (1, -1), (0, 0, (0,)), (0, 0, (4,), (1, 2)), (0, 0, (4,), (-1,))],
    )
    def test_nonsense_is_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError, match=r"token|request|histories"):
            StepShape(*arguments)


class TestSizes:
    def test_parameters_are_those_that_are_allocated(self) -> None:
        shape = ModelShape("small", 48, 3, 6, 2, 8, 64, 50)
        weights = random_weights(shape, seed=0)
        arrays = [weights.final_norm, weights.embedding]
        for layer in weights.layers:
            arrays += [layer.attention_norm, layer.qkv, layer.out, layer.mlp_norm, *layer.mlps[0]]
        assert sum(array.nbytes for array in arrays) == shape.weight_bytes

    def test_known_models_have_their_published_size(self) -> None:
        """Parameters as the model cards state them: SmolLM2-135M has 134.5 M, Llama-3.2-1B 1.236 B (both tied)."""
        assert PRESETS["smollm2-135m"].parameters == pytest.approx(134.5e6, rel=1e-3)
        assert PRESETS["llama-3.2-1b"].parameters == pytest.approx(1.236e9, rel=1e-3)

    def test_work_counts_every_pair_of_tokens_once(self) -> None:
        """Two chunks do the work of the whole prompt, but for the head, which runs once a step."""
        shape = PRESETS["tiny"]
        head = 2 * shape.hidden * shape.vocab
        whole = step_flops(shape, StepShape(prefill=(100,)))
        parts = step_flops(shape, StepShape(prefill=(40,))) + step_flops(shape, StepShape(prefill=(60,), history=(40,)))
        assert parts == pytest.approx(whole + head)
        token_by_token = sum(step_flops(shape, StepShape(1, context)) for context in range(100))
        assert token_by_token == pytest.approx(whole + 99 * head)


class TestMemory:
    def test_too_large_names_layers_that_fit(self) -> None:
        shape = PRESETS["llama-3.2-1b"]
        with pytest.raises(WrongUsage, match=r"--layers \d+") as caught:
            check_fits(shape, 2**31)
        layers = int(caught.value.remedy.split("--layers ")[1].split(")")[0])
        check_fits(replace(shape, layers=layers), 2**31)
        with pytest.raises(WrongUsage):
            check_fits(replace(shape, layers=layers + 1), 2**31)


class TestConfig:
    def test_grouped_queries(self, tmp_path: Path) -> None:
        shape = from_config(written(tmp_path, LLAMA))
        preset = PRESETS["llama-3.2-1b"]
        assert shape.parameters == preset.parameters
        assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 64)
        assert shape.name == tmp_path.name

    def test_defaults_are_those_of_the_library(self, tmp_path: Path) -> None:
        config = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "head_dim")}
        shape = from_config(written(tmp_path, {**config, "_name_or_path": "org/Some-Model"}))
        assert (shape.kv_heads, shape.head_dim, shape.name) == (32, 64, "Some-Model")

    def test_text_part_of_a_larger_model(self, tmp_path: Path) -> None:
        shape = from_config(written(tmp_path, {"model_type": "multi", "text_config": LLAMA}))
        assert shape.hidden == 2048

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ({"num_local_experts": 8}, "has no num_experts_per_tok"),
            ({"n_routed_experts": 8, "num_experts_per_tok": 9}, "9 of 8 experts"),
            ({"n_shared_experts": 1}, "every token passes"),
            ({"kv_lora_rank": 512}, "latent attention"),
            ({"num_key_value_heads": 5}, "on 5 key heads"),
            ({"head_dim": 63}, "heads of 63"),
        ],
    )
    def test_what_no_device_computes_is_refused(self, tmp_path: Path, change: dict[str, Any], found: str) -> None:
        with pytest.raises(BadInput, match=found):
            from_config(written(tmp_path, {**LLAMA, **change}))

    @pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "not json", '{"hidden_size": 8', "[" * 100_000])
    def test_not_a_config(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(BadInput, match=r"config\.json"):
            from_config(written(tmp_path, text))

    @given(
        st.dictionaries(st.sampled_from(sorted(LLAMA)), st.none() | st.booleans() | st.integers() | st.text(max_size=3))
    )
    def test_any_values_give_a_shape_or_bad_input(self, tmp_path_factory: pytest.TempPathFactory, change: Any) -> None:
        path = written(tmp_path_factory.mktemp("model"), {**LLAMA, **change})
        try:
            shape = from_config(path)
        except BadInput:
            return
        assert min(shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab) > 0


class TestExperts:
    MIXTURE: ClassVar[dict[str, Any]] = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}

    def test_the_published_size_of_a_mixture(self) -> None:
        """OLMoE-1B-7B is published with 6.9 B parameters, 1.3 B of them active for a token; its head is a matrix of its
        own, here it is the embedding."""
        shape = PRESETS["olmoe-1b-7b"]
        head = shape.vocab * shape.hidden
        assert shape.parameters + head == pytest.approx(6.9e9, rel=1e-2)
        active = shape.layers * shape.layer_parameters(shape.active_experts) + 2 * head
        assert active == pytest.approx(1.3e9, rel=2e-2)

    def test_a_step_counts_the_active_experts(self) -> None:
        shape = PRESETS["tiny-moe"]
        dense = replace(shape, experts=0, active_experts=0, intermediate=2 * shape.intermediate)
        router = 2 * shape.layers * shape.hidden * shape.experts
        cell = StepShape(4, 100)
        assert step_flops(shape, cell) == pytest.approx(step_flops(dense, cell) + 4 * router)


class TestModelOption:
    def test_preset_file_and_folder(self, tmp_path: Path) -> None:
        written(tmp_path, LLAMA)
        assert model_shape("tiny") is PRESETS["tiny"]
        assert model_shape(str(tmp_path)) == model_shape(str(tmp_path / "config.json"))

    def test_fewer_layers(self) -> None:
        shape = model_shape("tiny", layers=2)
        assert (shape.layers, shape.name) == (2, "tiny-2layers")
        assert model_shape("tiny", layers=4).name == "tiny"

    def test_errors(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="tiny, smollm2"):
            model_shape("gigantic")
        with pytest.raises(BadInput, match="no such configuration"):
            model_shape(str(tmp_path / "config.json"))
        with pytest.raises(WrongUsage, match="--layers"):
            model_shape("tiny", layers=0)
