"""Serving engines, one module each: metrics, settings and command lines."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.engines.engine import (
        FIRST_COME as FIRST_COME,
        SLOT_STEPS as SLOT_STEPS,
        Engine as Engine,
        Name as Name,
        Names as Names,
        Option as Option,
    )
    from latfit.engines.known import (
        BY_KEY as BY_KEY,
        ENGINES as ENGINES,
        RECORDED as RECORDED,
        describe_engines as describe_engines,
        engine_key as engine_key,
        engine_named as engine_named,
        engine_started_by as engine_started_by,
        graph_sizes_option as graph_sizes_option,
        setting_names as setting_names,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
