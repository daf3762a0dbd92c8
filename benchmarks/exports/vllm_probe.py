"""Run by an interpreter that has vLLM: its own parser reads command lines (`serve ...`, a JSON list of lists of words
on standard input), and its engine's configuration is resolved. Prints a JSON list, an object each."""

import importlib
import json
import sys
from typing import Any

FIELDS = (
    "model", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "enable_chunked_prefill",
    "max_model_len", "scheduling_policy", "async_scheduling", "tensor_parallel_size", "enable_prefix_caching",
)  # fmt: skip


def first_of(names: tuple[str, ...], what: str) -> Any:
    """From the module that has it in this version."""
    for name in names:
        try:
            return getattr(importlib.import_module(name), what)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"no {what} in {names}")


def main() -> None:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = first_of(("vllm.utils.argparse_utils", "vllm.utils"), "FlexibleArgumentParser")()
    cli = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    first_of(cli, "make_arg_parser")(parser.add_subparsers(dest="subparser").add_parser("serve"))
    lines = json.load(sys.stdin)
    print(json.dumps([read(parser, line, AsyncEngineArgs, vllm.__version__) for line in lines]))


def read(parser: Any, line: list[str], engine_args: Any, version: str) -> dict[str, Any]:
    """What is parsed, and what an engine makes of it."""
    given = parser.parse_args(line)
    if getattr(given, "model_tag", None):
        given.model = given.model_tag
    found: dict[str, Any] = {"version": version, "parsed": {name: getattr(given, name) for name in FIELDS}}
    try:
        config = engine_args.from_cli_args(given).create_engine_config()
        steps = config.scheduler_config
        found["resolved"] = {
            "max_num_seqs": steps.max_num_seqs,
            "max_num_batched_tokens": steps.max_num_batched_tokens,
            "long_prefill_token_threshold": steps.long_prefill_token_threshold,
            "enable_chunked_prefill": steps.enable_chunked_prefill,
            "max_model_len": config.model_config.max_model_len,
            "scheduling_policy": steps.policy,
            "async_scheduling": steps.async_scheduling,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        }
    except Exception as error:  # noqa: BLE001  of whatever version and machine
        found["unresolved"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return found


if __name__ == "__main__":
    main()
