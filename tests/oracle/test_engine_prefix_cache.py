"""Contents of prompts in the KV cache: the compiled core beside a slow engine in which every block has a number and a
name, and hit rates beside those of a plain dictionary."""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from latfit.simulation.engine.replicas import ROUTES, Routing, serve_replicas
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.requests import PrefixBlocks, Requests, make_requests
from tests.oracle.engine_reference import Cost, Engine, One

BLOCK, UNIT = 4, 12


class Caching(Engine):
    """Blocks of whole units of prompts have names, by request `units[number]`."""

    def __init__(
        self, requests: Requests, settings: EngineSettings, cost: Cost, units: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(requests, settings, cost)
        self.units = [each[: one.prompt // UNIT] for each, one in zip(units, self.all, strict=True)]
        self.whole: dict[int, list[int]] = {}
        self.uses: Counter[int] = Counter()
        self.mine: list[dict[int, int]] = [{} for _ in units]
        self.found = 0
        self.later: list[tuple[One, int]] = []

    def flush(self) -> None:
        """Those that run already have their units named once all of them have their blocks."""
        for one, tokens in self.later:
            self.name(one, tokens)
        self.later = []

    def make(self, planned: list[One]) -> None:
        self.flush()
        super().make(planned)

    def take(self, one: One, tokens: int) -> None:
        while len(one.blocks) * BLOCK < tokens:
            block = self.free.pop(0)
            self.holds.pop(block, None)
            self.whole = {name: blocks for name, blocks in self.whole.items() if block not in blocks}
            one.blocks.append(block)
        if one in self.running:
            self.later.append((one, tokens))
        else:
            self.name(one, tokens)

    def name(self, one: One, tokens: int) -> None:
        for k, name in enumerate(self.units[one.number]):
            if one.computed < (k + 1) * UNIT <= tokens and name not in self.whole:
                self.whole[name] = one.blocks[3 * k : 3 * k + 3]
                self.mine[one.number][k] = name
                self.uses[name] += 1

    def give_back(self, one: One) -> None:
        held = self.mine[one.number]
        kept = {block for k in held for block in one.blocks[3 * k : 3 * k + 3]}
        self.free += [block for block in reversed(one.blocks) if block not in kept]
        for k in sorted(held, reverse=True):
            name = held[k]
            self.uses[name] -= 1
            if not self.uses[name]:
                self.free += reversed(self.whole[name])
        held.clear()
        one.blocks = []

    def preempt(self, one: One) -> None:
        self.running.remove(one)
        self.preemptions += 1
        if one.leaves_in > 0:
            self.give_back(one)
            return
        all_held = len(self.mine[one.number]) == len(self.units[one.number])
        if self.settings.reuse_freed and all_held:
            for place in range(3 * len(self.units[one.number]), one.computed // BLOCK):
                self.holds[one.blocks[place]] = (one.number, place)
        self.give_back(one)
        one.computed = 0
        one.preempted += 1
        self.waiting.insert(0, one)

    def admit(self, planned: list[One], budget: int) -> None:
        self.flush()
        while budget > 0 and self.waiting and len(self.running) < self.settings.max_num_seqs:
            one = self.waiting[0]
            there = 0
            names = self.units[one.number]
            while there < min(len(names), (one.known - 1) // UNIT) and names[there] in self.whole:
                there += 1
            in_use = 3 * sum(self.uses[name] > 0 for name in names[:there])
            if math.ceil(one.known / BLOCK) - in_use > len(self.free):
                break
            for k, name in enumerate(names[:there]):
                if not self.uses[name]:
                    self.free = [block for block in self.free if block not in self.whole[name]]
                self.uses[name] += 1
                self.mine[one.number][k] = name
                one.blocks += self.whole[name]
            whose = {content: block for block, content in self.holds.items()}
            while there == len(names) and len(one.blocks) < (one.known - 1) // BLOCK:
                block = whose.get((one.number, len(one.blocks)))
                if block is None:
                    break
                one.blocks.append(block)
                self.free.remove(block)
            for block in [block for block, content in self.holds.items() if content[0] == one.number]:
                del self.holds[block]
            one.computed = len(one.blocks) * BLOCK
            self.found += 0 if one.preempted else one.computed
            budget -= self.start(one, budget)
            planned.append(one)


def conversations(seed: int, n: int, mean_gap_ms: float) -> tuple[Requests, list[list[int]]]:
    """Prompts that begin as earlier ones did, and go on otherwise: their units, by names of all that comes before."""
    rng = np.random.default_rng(seed)
    texts: list[list[int]] = [[]]
    units: list[list[int]] = []
    names: dict[tuple[int, ...], int] = {}
    for _ in range(n):
        text = list(texts[int(rng.integers(0, len(texts)))][: int(rng.integers(0, 7))])
        text += rng.integers(0, 3, int(rng.integers(0, 4))).tolist()
        texts.append(text)
        units.append([names.setdefault(tuple(text[: k + 1]), len(names)) for k in range(len(text))])
    prompt = [UNIT * len(each) + int(rng.integers(1 if not each else 0, UNIT)) for each in units]
    starts = np.concatenate([[0], np.cumsum([len(each) for each in units])])
    ids = np.array([name for each in units for name in each], dtype=np.int64)
    requests = make_requests(np.cumsum(rng.exponential(mean_gap_ms, n)), prompt, rng.integers(1, 30, n))
    return replace(requests, prefix=PrefixBlocks(UNIT, starts, ids)), units


def far_apart(requests: Requests) -> Requests:
    """So that one is served at a time."""
    return replace(requests, arrival_ms=1e5 * np.arange(len(requests), dtype=np.float64))


def cost_of(work: list[tuple[int, int, bool]]) -> float:
    return 3.0 + 0.25 * len(work) + 0.125 * sum(chunk for chunk, _, _ in work)


def random_settings(seed: int) -> EngineSettings:
    rng = np.random.default_rng(1000 + seed)
    return EngineSettings(
        max_num_seqs=int(rng.integers(2, 9)),
        max_num_batched_tokens=int(rng.choice([16, 40, 200])),
        kv_blocks=int(rng.choice([40, 60, 120, 400])),
        block_size=BLOCK,
        long_prefill_token_threshold=int(rng.choice([0, 7, 30])),
        asynchronous=bool(rng.integers(0, 2)),
        reuse_freed=bool(rng.integers(0, 4) > 0),
        padded_graphs=False,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_core_finds_what_the_slow_one_finds(seed: int) -> None:
    """To the last bit: moments, preemptions, steps, and the tokens that were cached."""
    requests, units = conversations(seed, 60, float(np.random.default_rng(seed).choice([3.0, 15.0, 60.0])))
    settings = random_settings(seed)
    slow = Caching(requests, settings, cost_of, units)
    slow.run()
    for fast in (True, False):
        run = serve(requests, linear_costs(3.0, 0.25, 0.125), replace(settings, fast=fast))
        assert run.first_ms.tolist() == [one.first for one in slow.all]
        assert run.last_ms.tolist() == [one.last for one in slow.all]
        assert (run.counters.steps, run.counters.preemptions) == (slow.steps, slow.preemptions)
        assert run.counters.cached_tokens == slow.found
        assert run.counters.free_blocks == settings.kv_blocks - settings.null_blocks


def test_these_cases_preempt_evict_and_share() -> None:
    """What is compared above happens in them."""
    found: Counter[str] = Counter()
    for seed in range(40):
        requests, _ = conversations(seed, 60, float(np.random.default_rng(seed).choice([3.0, 15.0, 60.0])))
        settings = random_settings(seed)
        run = serve(requests, linear_costs(3.0, 0.25, 0.125), settings)
        large = serve(requests, linear_costs(3.0, 0.25, 0.125), replace(settings, kv_blocks=5_000))
        found["preempted"] += run.counters.preemptions > 0
        found["cached"] += run.counters.cached_tokens > 0
        found["evicted"] += run.counters.cached_tokens < large.counters.cached_tokens
        found["resumed"] += run.counters.reused_tokens > 0
    assert min(found.values()) > 5
    assert len(found) == 4


def make_room(queue: OrderedDict[Any, int], room: int) -> None:
    """Take the oldest blocks; what is left of a unit is nobody's."""
    while room:
        name, size = queue.popitem(last=False)
        if size > room:
            queue["part", name] = size - room
            queue.move_to_end(("part", name), last=False)
        room -= min(size, room)


def lru_tokens(units: Sequence[Sequence[int]], requests: Requests, blocks: int) -> int:
    """Tokens found by a dictionary in order of use, of requests that come one after the other. All blocks stand in it:
    those of whole units by their names, others by names that nobody asks for."""
    queue: OrderedDict[Any, int] = OrderedDict({"unused": blocks})
    total, columns = 0, (requests.prompt_tokens.tolist(), requests.output_tokens.tolist())
    for number, (names, prompt, output) in enumerate(zip(units, *columns, strict=True)):
        hits = 0
        while hits < min(len(names), (prompt - 1) // UNIT) and names[hits] in queue:
            hits += 1
        total += hits * UNIT
        for name in names[:hits]:
            del queue[name]
        first, own = math.ceil(prompt / BLOCK), math.ceil((prompt + output - 1) / BLOCK)
        make_room(queue, first - 3 * hits)
        # A unit that stands behind one that was lost may still be there: the new copy has no name.
        kept = [name for name in names if name not in queue]
        make_room(queue, own - first)
        if own > 3 * len(kept):
            queue["rest", number] = own - 3 * len(kept)
        for name in reversed(kept):
            queue[name] = 3
    return total


def test_hits_are_those_of_a_dictionary_in_order_of_use() -> None:
    """Requests far apart, in caches from small to large."""
    requests, units = conversations(5, 400, 1.0)
    requests = far_apart(requests)
    found = []
    for blocks in (40, 60, 100, 200, 400, 4_000):
        settings = EngineSettings(kv_blocks=blocks + 1, block_size=BLOCK, max_num_batched_tokens=512)
        run = serve(requests, linear_costs(3.0, 0.25, 0.125), settings)
        assert run.counters.cached_tokens == lru_tokens(units, requests, blocks)
        found.append(run.counters.cached_tokens)
    assert found == sorted(found)
    assert found[0] < 0.8 * found[-1]


def ever_seen(units: Sequence[Sequence[int]], requests: Requests) -> int:
    """Tokens of which the units came before, in any request, with a cache that forgets nothing."""
    seen: set[int] = set()
    total = 0
    for names, prompt in zip(units, requests.prompt_tokens, strict=True):
        hits = 0
        while hits < min(len(names), (int(prompt) - 1) // UNIT) and names[hits] in seen:
            hits += 1
        total += UNIT * hits
        seen |= set(names)
    return total


def test_a_cache_that_forgets_nothing_finds_all_that_came_before() -> None:
    requests, units = conversations(7, 500, 1.0)
    requests = far_apart(requests)
    settings = EngineSettings(kv_blocks=50_000, block_size=BLOCK)
    run = serve(requests, linear_costs(3.0, 0.25, 0.125), settings)
    assert run.counters.cached_tokens == ever_seen(units, requests)


def test_blocks_of_other_sizes_than_the_engines() -> None:
    """Units of 12 tokens in blocks of 16 and 8: contents are known every 48 and 24 tokens."""
    requests, units = conversations(8, 300, 1.0)
    requests = far_apart(requests)
    for block, each in ((16, 4), (8, 2)):
        run = serve(requests, linear_costs(3.0, 0.25, 0.125), EngineSettings(kv_blocks=20_000, block_size=block))
        seen: set[int] = set()
        total = 0
        for names, prompt in zip(units, requests.prompt_tokens, strict=True):
            several = names[each - 1 :: each][: int(prompt) // (UNIT * each)]
            hits = 0
            while hits < min(len(several), (int(prompt) - 1) // (UNIT * each)) and several[hits] in seen:
                hits += 1
            total += UNIT * each * hits
            seen |= set(several)
        assert run.counters.cached_tokens == total


@pytest.mark.parametrize("route", ROUTES)
def test_replicas_have_a_cache_each(route: str) -> None:
    requests, _ = conversations(9, 600, 8.0)
    settings = EngineSettings(kv_blocks=200, block_size=BLOCK, max_num_seqs=8)
    run = serve_replicas(requests, linear_costs(3.0, 0.25, 0.125), settings, Routing(3, route))
    assert run.counters.free_blocks == 3 * 199
    assert run.counters.generated_tokens == int(requests.output_tokens.sum())
    if route != "round-robin":
        return
    for k in range(3):
        alone = serve(requests.select(slice(k, None, 3)), linear_costs(3.0, 0.25, 0.125), settings)
        np.testing.assert_array_equal(run.last_ms[k::3], alone.last_ms)


def test_the_longest_prefix_is_where_a_request_goes() -> None:
    """Far apart, so that all replicas are idle: the one that has seen most of the prompt, else the first."""
    names = [[0, 1, 2], [9], [0, 1, 3], [9, 8], [0, 5], [7]]
    starts = np.concatenate([[0], np.cumsum([len(each) for each in names])])
    ids = np.array([name for each in names for name in each], dtype=np.int64)
    requests = make_requests([1e4 * i for i in range(6)], [UNIT * len(each) + 1 for each in names], 3)
    requests = replace(requests, prefix=PrefixBlocks(UNIT, starts, ids))
    settings = EngineSettings(kv_blocks=500, block_size=BLOCK)
    run = serve_replicas(requests, linear_costs(3.0, 0.25, 0.125), settings, Routing(2, "prefix"))
    assert run.replica.tolist() == [0] * 6
    # The second comes while the first is served and goes to the idle one; from then on both have contents of their own.
    busy = replace(requests, arrival_ms=np.array([0.0, 1.0, 1e4, 2e4, 3e4, 4e4]))
    run = serve_replicas(busy, linear_costs(3.0, 0.25, 0.125), settings, Routing(2, "prefix", slack=0))
    assert run.replica.tolist() == [0, 1, 0, 1, 0, 0]
    assert run.counters.cached_tokens == UNIT * (2 + 1 + 1)


def test_prefix_routing_finds_more_than_taking_turns() -> None:
    requests, _ = conversations(3, 2_000, 8.0)
    settings = EngineSettings(kv_blocks=300, block_size=BLOCK, max_num_seqs=8)
    found = {
        route: serve_replicas(
            requests, linear_costs(3.0, 0.25, 0.125), settings, Routing(4, route)
        ).counters.cached_tokens
        for route in ("round-robin", "least-loaded", "prefix")
    }
    assert found["prefix"] > 1.1 * max(found["round-robin"], found["least-loaded"])
