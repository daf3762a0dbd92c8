"""What the lines of a vLLM start say of the engine: version, model, scheduler, cache, drafts.

    (EngineCore pid=1) INFO … Initializing a V1 LLM engine (v0.32.0) with config: model='org/m',
        speculative_config=None, … dtype=torch.bfloat16, max_seq_len=1024, … 'compile_ranges_endpoints': [2048], …
    (APIServer pid=2) INFO … non-default args: {'max_num_seqs': 64, 'async_scheduling': False, …}
    INFO … Chunked prefill is enabled with max_num_batched_tokens=8192.
    INFO … # GPU blocks: 2588, # CPU blocks: 0

Facts have the names under which latfit's recorder keeps them. The last end of the ranges that are compiled is the token
budget (`compile_ranges_endpoints`). What is not among the arguments that were given has vLLM's default, which no line
tells.
"""

import re
from collections.abc import Mapping
from typing import Any

START = b"Initializing a V1 LLM engine"
ARGUMENTS = b"non-default args: "
MARKS = (START, ARGUMENTS, b"Chunked prefill is enabled with max_num_batched_tokens=", b" blocks: ")
"""A line with one of these says something of an engine's start."""

LONGEST = 200
"""Letters of a name; what is longer is none."""

COUNTS: Mapping[str, bytes] = {
    "max_model_len": rb"\bmax_seq_len=(\d{1,9})\b",
    "tp": rb"\btensor_parallel_size=(\d{1,6})\b",
    "pipeline_parallel_size": rb"\bpipeline_parallel_size=(\d{1,6})\b",
    "data_parallel_size": rb"\bdata_parallel_size=(\d{1,6})\b",
    "num_speculative_tokens": rb"speculative_config=SpeculativeConfig\([^)]{0,1000}num_spec_tokens=(\d{1,3})\)",
}
FLAGS: Mapping[str, bytes] = {
    "enable_prefix_caching": rb"\benable_prefix_caching=(True|False)\b",
    "enable_chunked_prefill": rb"\benable_chunked_prefill=(True|False)\b",
}
NAMES: Mapping[str, bytes] = {
    "vllm": rb"V1 LLM engine \(v([^)\s]+)\)",
    "model": rb"\bmodel='([^']*)'",
    "dtype": rb"\bdtype=(?:torch\.)?(\w+)",
    "quantization": rb"\bquantization=(\w+)",
    "cache_dtype": rb"\bkv_cache_dtype=(\w+)",
    "device_type": rb"\bdevice_config=(\w+)",
}
ENDPOINTS = re.compile(rb"'compile_ranges_(?:endpoints|split_points)': \[([\d, ]{1,200})\]")
GIVEN_COUNTS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "long_prefill_token_threshold")
CHUNKED = re.compile(rb"max_num_batched_tokens=(\d{1,9})\b")
BLOCKS = re.compile(rb"# (?:GPU|CUDA|cuda) blocks: (\d{1,9})\b")


def facts_in(line: bytes) -> dict[str, Any]:
    """What one line says, by the names of a recorder's provenance; empty where it says nothing."""
    if START in line:
        return _of_start(line)
    if ARGUMENTS in line:
        return _of_arguments(line[line.index(ARGUMENTS) + len(ARGUMENTS) :])
    if found := CHUNKED.search(line):
        return {"max_num_batched_tokens": int(found[1])}
    found = BLOCKS.search(line)
    return {"num_gpu_blocks": int(found[1])} if found else {}


def _of_start(line: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {"num_speculative_tokens": 0} if b"speculative_config=None" in line else {}
    facts |= {name: int(found[1]) for name, shape in COUNTS.items() if (found := re.search(shape, line))}
    facts |= {name: found[1] == b"True" for name, shape in FLAGS.items() if (found := re.search(shape, line))}
    for name, shape in NAMES.items():
        found = re.search(shape, line)
        if found and 0 < len(found[1]) <= LONGEST:
            facts[name] = found[1].decode("utf-8", "replace")
    if ends := ENDPOINTS.search(line):
        numbers = [int(number) for number in ends[1].replace(b",", b" ").split()]
        facts |= {"max_num_batched_tokens": max(numbers)} if numbers and max(numbers) < 10**9 else {}
    return facts


def _of_arguments(text: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {"arguments_told": True}
    for name in GIVEN_COUNTS:
        if found := re.search(rb"'%s': (\d{1,9})\b" % name.encode(), text):
            facts[name] = int(found[1])
    if found := re.search(rb"'async_scheduling': (True|False)\b", text):
        facts["async_scheduling"] = found[1] == b"True"
    if found := re.search(rb"'num_speculative_tokens': (\d{1,3})\b", text):
        facts["num_speculative_tokens"] = int(found[1])
    return facts


def agreed(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """One value for each fact; of those on which starts differ, a list of all under `differing`."""
    values: dict[str, list[Any]] = {}
    for facts in starts:
        for name, value in facts.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    found = {name: several[0] for name, several in values.items() if len(several) == 1}
    differing = {name: several for name, several in values.items() if len(several) > 1}
    return {**found, "differing": differing} if differing else found
