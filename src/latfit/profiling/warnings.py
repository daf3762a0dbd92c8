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
        "Other programs kept {others:.1f} CPUs busy on average, and {spare:.0f} were left to them.{unstable}",
        "Stop them and measure again, or leave them a core with --threads.",
    ),
    "too_few_repeats": (
        "In {missed} of {measured} cells the median is not known within ±{precision:.3g} %.",
        "Measure longer: about --budget {budget_s}s would do on a machine this steady.",
    ),
    "too_few_repeats_in_a_day": (
        "In {missed} of {measured} cells the median is not known within ±{precision:.3g} %.",
        "A day of measuring would not do: accept a wider --precision, or find out what disturbs the machine.",
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
        "The CPU was throttled for heat {events} times during the run.",
        "Improve its cooling, or measure with fewer --threads.",
    ),
    "throttled_gpu": (
        "The driver held the GPU's clock down, for power or heat, when the run ended.",
        "Measure on a cooler machine; under such load in use, these times are the honest ones.",
    ),
    "slower_clock": (
        "The {what} ended at {now:.0f} MHz and had begun at {before:.0f} MHz.",
        "Let it warm up with a first run, fix its clock if you may, and measure again.",
    ),
}
"""Message and remedy by code; a code with two causes has a line for each."""

_CODES = {"too_few_repeats_in_a_day": "too_few_repeats", "throttled_gpu": "throttled"}


def warn(kind: str, **facts: object) -> Message:
    """Return a warning of the table with its facts filled in."""
    message, remedy = WARNINGS[kind]
    return Message(_CODES.get(kind, kind), message.format(**facts), remedy.format(**facts))
