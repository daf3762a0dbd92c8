"""The engine once more, slow and obvious: every KV block has a number, every list is a list. First come first served.

It follows the rules of vLLM's scheduler as they are told, one step after the other, and shares nothing with the
compiled core but the settings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from latfit.simulation.engine.settings import EngineSettings
from latfit.workload.requests import Requests


@dataclass
class One:
    """A request: tokens known (prompt and generated) and computed, blocks held, in order of the sequence."""

    number: int
    arrival: float
    prompt: int
    output: int
    generated: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    first: float = math.nan
    last: float = math.nan
    chunk: int = 0
    leaves_in: int = -1
    preempted: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.generated


Cost = Callable[[list[tuple[int, int, bool]]], float]
"""ms of a step from (chunk, computed before, whether it decodes) of its requests."""


class Engine:
    def __init__(self, requests: Requests, settings: EngineSettings, cost: Cost) -> None:
        columns = (requests.arrival_ms, requests.prompt_tokens, requests.output_tokens)
        self.coming = [One(i, float(t), int(p), int(o)) for i, (t, p, o) in enumerate(zip(*columns, strict=True))]
        self.all = list(self.coming)
        self.settings, self.cost = settings, cost
        self.waiting: list[One] = []
        self.running: list[One] = []
        self.free = list(range(settings.kv_blocks - settings.null_blocks))
        self.holds: dict[int, tuple[int, int]] = {}
        self.steps = self.preemptions = 0
        self.now = self.busy_until = float(requests.arrival_ms[0])

    def run(self) -> None:
        while self.coming or self.waiting or self.running:
            self.tick()

    def tick(self) -> None:
        """Plan at `now`: a step, or on to the next moment at which there may be one."""
        self.let_go()
        while self.coming and self.coming[0].arrival <= self.now:
            self.waiting.append(self.coming.pop(0))
        planned = self.plan()
        if planned:
            self.make(planned)
        elif self.busy_until > self.now:
            self.now = self.busy_until
        elif not self.running and not self.waiting and self.coming:
            self.now = max(self.now, self.coming[0].arrival)

    def let_go(self) -> None:
        for one in list(self.running):
            if one.leaves_in == 1:
                self.running.remove(one)
                self.give_back(one)
            elif one.leaves_in > 1:
                one.leaves_in -= 1

    def give_back(self, one: One) -> None:
        """Blocks to the young end of the free list, the last of the sequence first."""
        for block in reversed(one.blocks):
            self.free.append(block)
        one.blocks = []

    def take(self, one: One, tokens: int) -> None:
        while len(one.blocks) * self.settings.block_size < tokens:
            block = self.free.pop(0)
            self.holds.pop(block, None)
            one.blocks.append(block)

    def lacks(self, one: One, tokens: int) -> int:
        return math.ceil(tokens / self.settings.block_size) - len(one.blocks)

    def plan(self) -> list[One]:
        budget, planned, before = self.settings.max_num_batched_tokens, [], self.preemptions
        for one in list(self.running):
            if one not in self.running or one.leaves_in > 0:
                continue
            chunk = one.known - one.computed
            if chunk > 1 and self.settings.long_prefill_token_threshold:
                chunk = min(chunk, self.settings.long_prefill_token_threshold)
            chunk = min(chunk, budget)
            if chunk == 0:
                continue
            while one in self.running and self.lacks(one, one.computed + chunk) > len(self.free):
                self.preempt(self.running[-1])
            if one not in self.running:
                break
            self.take(one, one.computed + chunk)
            one.chunk, budget = chunk, budget - chunk
            planned.append(one)
        if self.preemptions == before:
            self.admit(planned, budget)
        return planned

    def preempt(self, one: One) -> None:
        self.running.remove(one)
        self.preemptions += 1
        if one.leaves_in > 0:
            self.give_back(one)
            return
        for place in range(one.computed // self.settings.block_size if self.settings.reuse_freed else 0):
            self.holds[one.blocks[place]] = (one.number, place)
        self.give_back(one)
        one.computed = 0
        one.preempted += 1
        self.waiting.insert(0, one)

    def admit(self, planned: list[One], budget: int) -> None:
        size = self.settings.block_size
        while budget > 0 and self.waiting and len(self.running) < self.settings.max_num_seqs:
            one = self.waiting[0]
            if math.ceil(one.known / size) > len(self.free):
                break
            whose = {content: block for block, content in self.holds.items()}
            while len(one.blocks) < (one.known - 1) // size and (one.number, len(one.blocks)) in whose:
                one.blocks.append(whose[one.number, len(one.blocks)])
            for block in one.blocks:
                self.free.remove(block)
            for block in [block for block, content in self.holds.items() if content[0] == one.number]:
                del self.holds[block]
            one.computed = len(one.blocks) * size
            budget -= self.start(one, budget)
            planned.append(one)

    def start(self, one: One, budget: int) -> int:
        """The first of those that wait runs, with what is found of it computed; tokens of its first step."""
        chunk = one.known - one.computed
        if chunk > 1 and self.settings.long_prefill_token_threshold:
            chunk = min(chunk, self.settings.long_prefill_token_threshold)
        one.chunk = min(chunk, budget)
        self.take(one, one.computed + one.chunk)
        self.running.append(self.waiting.pop(0))
        return one.chunk

    def make(self, planned: list[One]) -> None:
        begin = max(self.now, self.busy_until)
        end = begin + self.cost([(one.chunk, one.computed, one.known - one.computed == 1) for one in planned])
        self.steps += 1
        for one in planned:
            one.computed += one.chunk
            if one.computed < one.known:
                continue
            one.generated += 1
            if one.generated == 1:
                one.first = end
            if one.generated == one.output:
                one.last = end
                one.leaves_in = 1 + int(self.settings.asynchronous)
        self.busy_until = end
        self.now = begin if self.settings.asynchronous else end
