"""Fitted step models of systems that others measured, by name, and a team's own."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.catalogue.entry import (
        KERNELS as KERNELS,
        PREFIX as PREFIX,
        STEPS as STEPS,
        CatalogEntry as CatalogEntry,
        add_entry as add_entry,
        all_entries as all_entries,
        entry_named as entry_named,
        fit_of as fit_of,
    )
    from latfit.catalogue.scaling import (
        GPUS as GPUS,
        NEIGHBOUR_ERROR as NEIGHBOUR_ERROR,
        TRANSFER as TRANSFER,
        nearest as nearest,
        scaled_steps as scaled_steps,
        widen as widen,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
