"""`examine_machine`: what this machine has, and what is missing for which feature."""

from dataclasses import dataclass

from latfit.api.answer import Answer
from latfit.profiling import Inventory, inventory
from latfit.units import format_bytes, number


@dataclass(frozen=True, repr=False, eq=False)
class MachineExamination(Answer):
    """What a machine has, and what is missing for which feature."""

    result: Inventory

    @property
    def verdict(self) -> str:
        ready = sum(each.ready for each in self.result.features)
        return f"{ready} of {len(self.result.features)} features are ready on this machine."

    @property
    def lines(self) -> list[str]:
        found, machine, isa = self.result, self.result.machine, self.result.isa
        usable = len(machine["affinity"] or [])
        shared = "" if usable == machine["cores"] else f", {usable} of them usable"
        quota = "" if machine["cpu_quota"] is None else f", a quota of {number(machine['cpu_quota'], 3)}"
        no_amx = f"; no AMX: {isa['amx']}" if isa["amx"] else ""
        memory, free = (
            format_bytes(size) if size else "unknown" for size in (machine["memory_bytes"], found.free_bytes)
        )
        gpus = [f"{gpu.name}{f', {format_bytes(gpu.memory_bytes)}' if gpu.memory_bytes else ''}" for gpu in found.gpus]
        versions = [f"{name} {version}" for name, version in found.packages.items() if version]
        return [
            f"CPU: {machine['cpu']}, {machine['cores']} cores{shared}{quota}.",
            f"Instructions: {', '.join(name for name, why in isa.items() if not why) or 'none known'}{no_amx}.",
            f"Memory: {memory}, {free} free. GPU: {'; '.join(gpus) or 'none found'}.",
            f"{machine['os']}, Python {machine['python']}; {', '.join(versions) or 'no extras installed'}.",
            *(f"  {each}" for each in self.features),
        ]

    @property
    def features(self) -> list[str]:
        """What is ready, in a line; then a line for each feature that is not: why, and what mends it."""
        found = [f"ready: {'; '.join(each.name for each in self.result.features if each.ready)}."]
        for each in self.result.features:
            if not each.ready:
                why = "" if each.is_extra else f" {each.missing}."  # an extra says enough by its name
                found.append(f"missing: {each.name}:{why} {each.remedy}")
        return found


def examine_machine() -> MachineExamination:
    """Return what this machine has and lacks; nothing is measured and nothing heavy imported."""
    return MachineExamination(inventory())
