"""What a vLLM log says of the engine's start, and what it does not."""

from pathlib import Path

import pytest

from latfit.trace.read import ingest
from latfit.trace.readers.vllm import settings_in
from latfit.trace.serving_engine import engine_facts
from tests.unit.trace.test_vllm import capacity, step

INIT = (
    "(EngineCore pid=9) INFO 12-22 21:40:00 [core.py:97] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='org/m-8b', speculative_config={speculation}, dtype=torch.bfloat16, max_seq_len=4096, "
    "tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, quantization=None, kv_cache_dtype=auto, "
    "device_config=cuda, enable_prefix_caching=True, enable_chunked_prefill=True, "
    "compilation_config={{'compile_ranges_endpoints': [512, 8192], 'x': []}}\n"
)
ARGUMENTS = (
    "(APIServer pid=1) INFO 12-22 21:39:00 [api_utils.py:286] non-default args: {'model': 'org/m-8b', "
    "'max_num_seqs': 64, 'block_size': 32, 'async_scheduling': False}\n"
)


def log(folder: Path, *lines: str) -> Path:
    path = folder / "server.log"
    path.write_text("".join([*lines, *(step(i) for i in range(40))]))
    return path


class TestLines:
    def test_the_line_of_the_start(self) -> None:
        found = settings_in(INIT.format(speculation="None").encode())
        assert found == {
            "vllm": "0.32.0",
            "model": "org/m-8b",
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "tp": 2,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "quantization": "None",
            "cache_dtype": "auto",
            "device_type": "cuda",
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "num_speculative_tokens": 0,
            "max_num_batched_tokens": 8192,
        }

    def test_arguments_and_older_lines(self) -> None:
        assert settings_in(ARGUMENTS.encode()) == {
            "max_num_seqs": 64,
            "block_size": 32,
            "async_scheduling": False,
        }
        assert settings_in(b"Chunked prefill is enabled with max_num_batched_tokens=2048.") == {
            "max_num_batched_tokens": 2048
        }
        assert settings_in(b"# GPU blocks: 2588, # CPU blocks: 0") == {"num_gpu_blocks": 2588}


class TestOfTraces:
    def test_a_log(self, tmp_path: Path) -> None:
        read = ingest(log(tmp_path, ARGUMENTS, INIT.format(speculation="None"), capacity("41,408")))
        found = engine_facts([(read.name, read.trace.provenance)])
        wanted = {"max_num_seqs": 64, "block_size": 32, "max_num_batched_tokens": 8192, "kv_capacity_tokens": 41408}
        assert wanted.items() <= found.values.items()
        assert found.values["async_scheduling"] is False
        assert set(found.sources.values()) == {"server.log"}

    @pytest.mark.parametrize(("device", "path"), [("cuda", "gpu"), ("xpu", "gpu"), ("cpu", "cpu")])
    def test_the_path_is_that_of_the_device(self, tmp_path: Path, device: str, path: str) -> None:
        start = INIT.format(speculation="None").replace("device_config=cuda", f"device_config={device}")
        assert ingest(log(tmp_path, start)).path == path

    def test_two_starts_in_one_log(self, tmp_path: Path) -> None:
        other = ARGUMENTS.replace("64", "16")
        read = ingest(log(tmp_path, ARGUMENTS, INIT.format(speculation="None"), other, capacity("41,408")))
        found = engine_facts([(read.name, read.trace.provenance)])
        assert "max_num_seqs" not in found.values
        assert found.differing["max_num_seqs"] == (64, 16)

    def test_files_that_agree_and_files_that_do_not(self) -> None:
        parts = {"/x/a.parquet": {"block_size": 16, "max_num_seqs": 8}, "/x/b.parquet": {"block_size": 16}}
        found = engine_facts([("two files", {"parts": parts})])
        assert found.values == {"block_size": 16, "max_num_seqs": 8}
        assert found.sources == {"block_size": "a.parquet and 1 more", "max_num_seqs": "a.parquet"}
        assert found.files == ["a.parquet", "b.parquet"]
        parts["/x/b.parquet"]["max_num_seqs"] = 9
        assert engine_facts([("two files", {"parts": parts})]).differing == {"max_num_seqs": (8, 9)}
