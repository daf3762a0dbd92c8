"""Serving engines, one module each: metrics, settings and command lines."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.engines.engine import FIRST_COME, SLOT_STEPS, Engine, Name, Names, Option
    from latfit.engines.known import (
        BY_KEY,
        ENGINES,
        RECORDED,
        describe_engines,
        engine_key,
        engine_named,
        engine_started_by,
        graph_sizes_option,
        setting_names,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
