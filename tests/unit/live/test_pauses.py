"""Collections pass over what was there before."""

import gc

from latfit.live import short_pauses


def test_what_was_alive_is_looked_at_no_more_and_later_again() -> None:
    gc.unfreeze()
    gc.collect()
    before = gc.get_freeze_count()
    with short_pauses():
        assert gc.get_freeze_count() > before + 1000
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before
    with short_pauses(none=True):
        assert not gc.isenabled()
    assert gc.isenabled()
