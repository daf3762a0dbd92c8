"""The request level a second time: plain lists, one event after the other, the policy asked at every one of them.

The compiled core asks a policy only when the policy said it wanted to be asked; that both agree shows that the policy
asked for the right moments too.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from latfit.policies.codes import MOST_AGED, T_CUT
from latfit.policies.policy import Policy
from latfit.simulation.policies.event_loop import Load
from latfit.simulation.policies.service import ServicePath, System
from latfit.workload.load import SERVICE, Streams
from tests.unit.policies.asked import QueueView, decision


@dataclass
class Served:
    """By request: response in ms, path (0 main, 1 side), arrival; what was never served is missing."""

    response: dict[int, float] = field(default_factory=dict)
    path: dict[int, int] = field(default_factory=dict)
    arrive: dict[int, float] = field(default_factory=dict)


class Reference:
    def __init__(self, policy: Policy, system: System, drawn: Load, streams: Streams) -> None:
        self.policy, self.system, self.load = policy, system, drawn
        self.times = system.tables.typical
        self.rngs = [streams.generator(SERVICE, path) for path in range(2)]
        self.free = [[0.0] * path.servers for path in system.paths] + [[math.inf]] * (2 - len(system.paths))
        self.queue: list[int] = []
        self.served = Served()
        self.issued = 0
        self.coming: list[float] = []
        if self.load.users:
            for _ in range(min(self.load.users, len(self.load.arrive))):
                self.send(0.0)
        else:
            self.coming = self.load.arrive.tolist()
            self.issued = len(self.coming)

    def send(self, now: float) -> None:
        if self.issued < len(self.load.think):
            self.coming.append(now + float(self.load.think[self.issued]))
            self.coming.sort()
            self.issued += 1

    def class_of(self, i: int) -> int:
        return int(self.load.class_id[i]) if len(self.load.class_id) else 0

    def run(self) -> Served:
        until, arrived = math.inf, 0
        now = -1.0
        while True:
            ends = [t for path in self.free for t in path if now < t < math.inf]
            moment = min([*ends, *self.coming[:1], until], default=math.inf)
            if moment == math.inf:
                return self.served
            now = moment
            while self.coming and self.coming[0] <= now:
                self.served.arrive[arrived] = self.coming.pop(0)
                self.queue.append(arrived)
                arrived += 1
            until = self.act(now)
            if not self.queue and not self.coming:
                return self.served

    def act(self, now: float) -> float:
        """Let the policy act until it waits; returns when it wants to be asked again."""
        while True:
            decided = decision(self.policy, self.view(now), self.times)
            if decided.action == "wait":
                return decided.until_ms
            ordered = sorted(self.queue, key=lambda i: self.rank(i, now))
            taken = ordered[decided.passed : decided.passed + decided.take]
            self.queue = [i for i in self.queue if i not in taken]
            self.serve(0 if decided.action == "serve main" else 1, taken, now)

    def rank(self, i: int, now: float) -> tuple[float, int, int]:
        age = now - self.served.arrive[i]
        return (self.class_of(i) - age / self.policy.ageing_ms, self.class_of(i), i)

    def view(self, now: float) -> QueueView:
        arrive = self.served.arrive
        oldest = min((arrive[i] for i in self.queue), default=math.inf)
        due = min((arrive[i] + self.load.deadlines[self.class_of(i)] for i in self.queue), default=math.inf)
        cutoff = self.policy.parameters[T_CUT]
        aged = sum(arrive[i] + cutoff <= now for i in self.queue) if len(self.system.paths) > 1 else 0
        return QueueView(now, len(self.queue), oldest, self.free[0], self.free[1], min(aged, MOST_AGED), due)

    def serve(self, path: int, taken: list[int], now: float) -> None:
        server = self.free[path].index(min(self.free[path]))
        lasts = self.lasts(self.system.paths[path], path, taken)
        self.free[path][server] = now + lasts
        for i in taken:
            self.served.response[i] = now + lasts - self.served.arrive[i]
            self.served.path[i] = path
        for _ in taken if self.load.users else ():
            self.send(now + lasts)

    def lasts(self, on: ServicePath, path: int, taken: list[int]) -> float:
        row = on.times_ms[len(taken)]
        tokens = float(sum(self.load.tokens[i] for i in taken)) if len(on.tokens) > 1 else 0.0
        T = float(np.interp(tokens, on.tokens, row))
        if on.exponential:
            T *= -math.log1p(-self.rngs[path].random())
        elif on.noise is not None:
            law = on.noise.groups[int(on.noise.group_of(np.array([len(taken)]))[0])]
            u, reached = self.rngs[path].random(), np.cumsum(law.weights)
            T *= float(law.values[min(int(np.sum(reached <= u)), len(reached) - 1)])
        return T
