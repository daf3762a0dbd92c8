"""The limits of a simulated serving engine as options, by the names that serving engines use."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from latfit.sim.engine.settings import EngineSettings


@dataclass(frozen=True)
class EngineOptions:
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="chunked-prefill (as vLLM does), continuous, selective or static. Repeatable."),
    ] = None
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Requests in a step, at most.")] = 256
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens in a step, at most.")
    ] = 2048
    kv_blocks: Annotated[
        int | None,
        typer.Option("--kv-blocks", help="Blocks of the KV cache, as the engine resolves them at its start."),
    ] = None
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens in a block.")] = 16
    long_prefill_token_threshold: Annotated[
        int, typer.Option("--long-prefill-token-threshold", help="Prompt tokens of one request in a step; 0: no limit.")
    ] = 0
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Plan a step after the one before it, not while it runs.")
    ] = False

    def settings(self) -> "list[EngineSettings]":
        """Of each engine asked for. Raises WrongUsage for what none can be set to, or without the size of the cache."""
        from latfit.errors import WrongUsage
        from latfit.sim.engine.settings import EngineSettings

        if self.kv_blocks is None:
            raise WrongUsage(
                "the size of the KV cache decides most, and is not given",
                where="--kv-blocks",
                remedy="Look for `GPU KV cache size: ... tokens` in the engine's log and divide by the block size.",
            )
        return [
            EngineSettings(
                batching=name,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                kv_blocks=self.kv_blocks,
                block_size=self.block_size,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                asynchronous=not self.synchronous,
            )
            for name in self.engine or ["chunked-prefill"]
        ]
