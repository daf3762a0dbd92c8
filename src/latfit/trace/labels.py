"""What systems of one source are called: labels that are unique, can be read back, and serve as a part of a file's name
on any file system.

A label holds the values of the columns that tell the systems apart, joined by commas. Bytes (UTF-8) of a value other
than A-Z a-z 0-9 _ . - stand as %XX, as in an address; a value alone that is empty is called `unnamed`. So a label says
its values, except where it would be too long for a file's name: then its end is replaced by a digest of the whole.
File systems that take A for a would write two labels that differ only so into one file: each of them gets a digest.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from urllib.parse import quote

UNNAMED = "unnamed"
JOIN, DIGEST = ",", "~"
"""What joins values, and what begins a digest: no value holds them, they would stand as %2C and %7E."""

LONGEST = 120
"""Bytes of a label. A file's name, with that of the source and what is added while it is written, may have 255."""

DIGEST_DIGITS = 12


def system_label(system: Mapping[str, str]) -> str:
    """The label of one system; empty where nothing tells it from others."""
    if not system:
        return ""
    values = [_quoted(value) for value in system.values()]
    label = JOIN.join(values) or UNNAMED
    if values == [UNNAMED]:
        label = f"%{ord(UNNAMED[0]):02X}{UNNAMED[1:]}"
    return label if len(label) <= LONGEST else _shortened(label)


def system_labels(systems: Sequence[Mapping[str, str]]) -> list[str]:
    """The labels of all systems of a source, also different where upper and lower case are the same."""
    labels = [system_label(system) for system in systems]
    alike = Counter(label.lower() for label in labels)
    return [_shortened(label) if alike[label.lower()] > 1 else label for label in labels]


def _quoted(value: str) -> str:
    # `quote` leaves ~ as it is, which begins a digest here
    return quote(value, safe="", errors="surrogatepass").replace("~", "%7E")


def _shortened(label: str) -> str:
    digest = hashlib.sha256(label.encode()).hexdigest()[:DIGEST_DIGITS]
    begin = label[: LONGEST - DIGEST_DIGITS - 1]
    cut = begin.rfind("%", len(begin) - 2)
    return f"{begin if cut < 0 else begin[:cut]}{DIGEST}{digest}"
