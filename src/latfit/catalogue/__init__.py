"""Fitted step models of systems that others measured, by name, and a team's own."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.catalogue.entry import KERNELS, PREFIX, STEPS, CatalogEntry, add_entry, all_entries, entry_named, fit_of
    from latfit.catalogue.scaling import GPUS, NEIGHBOUR_ERROR, TRANSFER, nearest, scaled_steps, widen

__all__, __getattr__, __dir__ = face(__name__, __file__)
