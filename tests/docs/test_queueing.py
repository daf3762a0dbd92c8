"""The examples in the documentation run, and their numbers are right."""

import re

from tests.conftest import ROOT


def test_examples() -> None:
    page = (ROOT / "docs" / "queueing.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
