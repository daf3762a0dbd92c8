"""The library's names stay what they are, whatever else was imported."""

import importlib

import latfit
from latfit.api import report


def test_a_verb_outlives_the_import_of_a_package_of_its_name() -> None:
    importlib.import_module("latfit.report")
    assert latfit.report is report
    from latfit.report import style

    assert style.DPI > 0
    assert all(callable(getattr(latfit, name)) for name in latfit.__all__ if name != "__version__")
