"""Prometheus's text format: a sample a line, `name{label="value",...} number [timestamp]`, comments behind `#`.

https://prometheus.io/docs/instrumenting/exposition_formats. Other lines are passed over.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from latfit.inputs import LARGEST_NUMBER

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]{0,150})(?:\{(.{0,20000}?)\})?\s+([-+]?[\d.eEinfINFaN+-]{1,40})(?:\s+-?\d+)?(?:\s+#.*)?\s*"
)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
MOST_BYTES = 1 << 26


class Sample(NamedTuple):
    """A number with its name and labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples_in(lines: Iterable[bytes]) -> Iterator[Sample]:
    """The samples of a text, up to `MOST_BYTES` of it; a value that is not finite or beyond
    `LARGEST_NUMBER` counts as 0."""
    size = 0
    for line in lines:
        size += len(line)
        if size > MOST_BYTES:
            return
        if line.startswith(b"#"):
            continue
        told = _SAMPLE.fullmatch(line.decode("utf-8", "replace").rstrip("\r\n"))
        if told is None:
            continue
        try:
            value = float(told[3])
        except ValueError:
            continue
        believable = abs(value) <= LARGEST_NUMBER  # not where it is NaN
        yield Sample(told[1], dict(_LABEL.findall(told[2] or "")), value if believable else 0.0)
