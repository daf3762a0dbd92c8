"""`examine_machine`: what this machine has, and what is missing for which feature."""

from dataclasses import dataclass
from typing import Any

from latfit.api.answer import Answer
from latfit.profiling import Inventory, inventory
from latfit.units import format_bytes, number


@dataclass(frozen=True, repr=False, eq=False)
class MachineExamination(Answer):
    """What a machine has, and what is missing for which feature."""

    found: Inventory

    @property
    def verdict(self) -> str:
        """How much can be done here."""
        ready = sum(each.ready for each in self.found.features)
        return f"{ready} of {len(self.found.features)} features are ready on this machine."

    @property
    def lines(self) -> list[str]:
        """The machine, then its features, indented."""
        machine, isa = self.found.machine, self.found.isa
        usable = machine["affinity"] or []
        no_amx = f"; no AMX: {isa['amx']}" if isa["amx"] else ""
        shared = "" if len(usable) == machine["cores"] else f", {len(usable)} of them usable"
        quota = "" if machine["cpu_quota"] is None else f", a quota of {number(machine['cpu_quota'], 3)}"
        sizes = [machine["memory_bytes"], self.found.free_bytes]
        memory, free = (format_bytes(size) if size else "unknown" for size in sizes)
        gpus = [
            f"{gpu.name}{f', {format_bytes(gpu.memory_bytes)}' if gpu.memory_bytes else ''}" for gpu in self.found.gpus
        ]
        versions = [f"{name} {version}" for name, version in self.found.packages.items() if version]
        return [
            f"CPU: {machine['cpu']}, {machine['cores']} cores{shared}{quota}.",
            f"Instructions: {', '.join(name for name, why in isa.items() if not why) or 'none known'}{no_amx}.",
            f"Memory: {memory}, {free} free. GPU: {'; '.join(gpus) or 'none found'}.",
            f"{machine['os']}, Python {machine['python']}; {', '.join(versions) or 'no extras installed'}.",
            *(f"  {each}" for each in self.features),
        ]

    @property
    def features(self) -> list[str]:
        """What is ready, in a line; then a line for each that is not: why, and what mends it. An extra that is to be
        installed says enough by its name."""
        ready = [each.name for each in self.found.features if each.ready]
        lacking = [each for each in self.found.features if not each.ready]
        return [
            f"ready: {'; '.join(ready)}.",
            *(
                f"missing: {each.name}: {each.remedy}"
                if each.is_extra
                else f"missing: {each.name}: {each.missing}. {each.remedy}"
                for each in lacking
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit doctor --json`."""
        return self.found.to_json()


def examine_machine() -> MachineExamination:
    """What this machine has and what is missing for which feature; nothing is measured and nothing heavy imported."""
    return MachineExamination(inventory())
