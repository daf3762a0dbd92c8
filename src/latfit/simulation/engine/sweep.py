"""A point of a sweep of engines: a load, settings and engines, whose result keeps no single request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from latfit.files import dumps
from latfit.inputs import decode_json
from latfit.simulation.engine.replications import Cluster, Replications, replicate, result_of
from latfit.simulation.engine.result import EngineResult, Promise
from latfit.simulation.engine.run import EngineRun
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import StepCosts
from latfit.simulation.points import Row, digest
from latfit.simulation.policies.run import Options
from latfit.simulation.summary import EngineSummary
from latfit.threads import on_threads
from latfit.workload import Load, RecordedLoad

Told = Callable[[EngineRun, EngineSettings], Sequence[str]]
"""What should be known of a run."""


@dataclass(frozen=True, eq=False)
class EnginePoint:
    """See `SweepPoint`. labels: the settings that were varied.  told: says more of the first replication.  whole:
    whether the result keeps it."""

    load: Load
    costs: StepCosts
    settings: EngineSettings
    options: Options
    promise: Promise
    cluster: Cluster
    labels: Mapping[str, Any] = field(default_factory=dict)
    told: Told | None = None
    whole: bool = False

    @property
    def key(self) -> str:
        return digest((self.load, self.costs, self.settings, self.options, self.promise, self.cluster))

    def run(self, threads: int, begun: Callable[[float], None] | None) -> EngineResult:
        """The result; see `SweepPoint`."""
        found = self._replicated(threads)
        result = self._result(found.summary(self.promise))
        first = found.runs[0]
        told = self.told(first, self.settings) if self.told else ()
        return replace(result, first=first if self.whole else None, notes=[*told, *result.notes])

    def _result(self, summary: EngineSummary) -> EngineResult:
        found = result_of(self.load, summary, self.settings, self.options, self.cluster)
        return replace(found, labels=self.labels)

    def _replicated(self, threads: int) -> Replications:
        def some(numbers: Sequence[int]) -> Replications:
            return replicate(self.load, self.costs, self.settings, self.options, self.cluster, numbers)

        if threads < 2 or isinstance(self.load, RecordedLoad):
            return some(())
        with on_threads(threads) as pool:
            parts = list(pool.map(lambda number: some([number]), range(self.options.replications)))
        return replace(parts[0], runs=[part.runs[0] for part in parts])

    def row(self, result: EngineResult) -> Row:
        """The result as a flat row, `document` being its JSON."""
        return {**result.row(), "notes": " ".join(result.notes), "document": dumps(result.to_json())}

    def restored(self, row: Row) -> EngineResult:
        known = decode_json(row["document"].encode())
        return replace(self._result(EngineSummary.from_json(known)), notes=known["notes"])
