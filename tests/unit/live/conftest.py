"""Tests may be coroutine functions: each runs on its own event loop, on virtual time if its module has VIRTUAL_TIME."""

import asyncio
import inspect

import pytest

from tests.unit.live.virtual import on_virtual_time


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run = on_virtual_time if getattr(pyfuncitem.module, "VIRTUAL_TIME", False) else asyncio.run
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
