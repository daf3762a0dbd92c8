"""Every warning of a run, with what to do about it."""

from collections.abc import Mapping

from latfit.messages import Message

QUIET = "Close other programs, leave a core free (--threads), and measure longer (--budget)."
COOLING = (
    "The CPU or GPU may have heated up, changed its clock, or been shared: let it cool, fix its clock (cpupower"
    " frequency-set -g performance; nvidia-smi --lock-gpu-clocks), and measure again."
)
SEVERAL = "Take more processes (--processes 6), or pin them (--pin)."

WARNINGS: Mapping[str, tuple[str, str]] = {
    "unstable_timing": ("Timing is unstable: {symptoms}.", "{remedy}"),
    "other_load": (
        "Other programs kept {others:.1f} CPUs busy on average, and {spare:.0f} were left to them.",
        "Stop them and measure again, or leave them a core with --threads.",
    ),
    "too_few_repeats": (
        "In {missed} of {measured} cells the median is not known within ±{precision:.3g} %.",
        "Measure longer (about --budget {budget_s}s on a machine this steady), or accept a wider --precision.",
    ),
    "not_measured": (
        "{missing} of {cells} cells were not measured, up to {largest}.",
        "Give more than {budget} (--budget), or ask for fewer cells (--grid).",
    ),
    "device_failed": ("{found}; the run ended there.", "{remedy}"),
    "busy_cpus": (
        "Others keep CPUs busy, so {threads} of {most} threads were used.",
        "Stop them and measure again, or say how many you want with --threads.",
    ),
    "throttled": (
        "The {what} was throttled during the run, for power or heat.",
        "Cool it better, or measure with fewer --threads; in use under such load, these times are the honest ones.",
    ),
}
"""Message and remedy by code."""


def warn(code: str, **facts: object) -> Message:
    """Return a warning of the table with its facts filled in."""
    message, remedy = WARNINGS[code]
    return Message(code, message.format(**facts), remedy.format(**facts))
