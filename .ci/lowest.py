"""Prints the lowest versions that pyproject.toml allows of what the core needs, as constraints for pip."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    name, lowest = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement).groups()
    print(f"{name}=={lowest}")
