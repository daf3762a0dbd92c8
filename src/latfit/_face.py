"""Public names of a package, each loaded at its first use (PEP 562).

A package lists them once: `if TYPE_CHECKING: from latfit.package.module import name`.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def face(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, from the TYPE_CHECKING block of `__init__.py`."""
    block = next(node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
    home = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = home[name]
        found = import_module(module)
        shown = module != package and (not hasattr(found, "__path__") or original in getattr(found, "__all__", ()))
        return getattr(found, original) if shown else import_module(f"{module}.{original}")

    public = sorted(home)
    return public, load, lambda: public
