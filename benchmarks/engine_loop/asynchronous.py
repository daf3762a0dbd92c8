"""Put on PYTHONPATH as `sitecustomize`: asynchronous scheduling in a vLLM on CPUs, which turns it off by itself."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class Patch(MetaPathFinder):
    """Changes vLLM's CPU platform once it is imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def patched(module: Any) -> None:
            load(module)
            platform = module.CpuPlatform
            check = platform.check_and_update_config

            def asynchronous(config: Any) -> None:
                check(config)
                config.scheduler_config.async_scheduling = True

            platform.check_and_update_config = staticmethod(asynchronous)

        loader.exec_module = patched
        return spec


sys.meta_path.insert(0, Patch())
