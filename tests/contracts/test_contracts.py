"""Keys and types of what commands print and write, and their help, are as recorded: others build on them.

A change on purpose: `python -m tests.contracts.commands --record`, and read the diff. Values are none of this.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.commands import COMMANDS, FILES, HERE, help_texts, outputs, shape

NAMES = [*COMMANDS, *FILES]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outputs(tmp_path_factory.mktemp("contracts"))


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_types_are_as_recorded(name: str, printed: dict[str, Any]) -> None:
    recorded = json.loads((HERE / "shapes" / f"{name}.json").read_text())
    assert differences(recorded, shape(printed[name])) == []


def differences(recorded: Any, found: Any, where: str = "") -> list[str]:
    """Where two shapes differ. A list or value that was empty at recording, or is now, says nothing."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        gone = [f"{where}.{key} is gone" for key in recorded.keys() - found.keys()]
        new = [f"{where}.{key} is new" for key in found.keys() - recorded.keys()]
        both = recorded.keys() & found.keys()
        return sorted(gone + new) + [
            d for key in sorted(both) for d in differences(recorded[key], found[key], f"{where}.{key}")
        ]
    if "null" in (recorded, found) or [] in (recorded, found):
        return []
    return [] if recorded == found else [f"{where}: {recorded} became {found}"]


def test_help_is_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    told = "".join(f"$ {name} --help\n{text}\n" for name, text in help_texts().items())
    assert told == Path(HERE / "help.txt").read_text()
