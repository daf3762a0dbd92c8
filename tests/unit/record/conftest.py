"""Imports vLLM, where it is, before the tests: with torch it warns of itself, and in tests warnings are errors."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import latfit.record.vllm_plugin  # noqa: F401
