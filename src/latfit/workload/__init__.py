"""Requests: how they arrive, how long they are, recorded ones."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.workload.arrivals import ArrivalProcess, Dealt, Gamma, Piecewise, Poisson, bursts, parse_arrival_process
    from latfit.workload.load import (
        ARRIVALS,
        CLASSES,
        LENGTHS,
        SERVICE,
        ClosedLoad,
        Load,
        OpenLoad,
        RecordedLoad,
        RequestClass,
        Streams,
        draw_classes,
        parse_class,
    )
    from latfit.workload.recordings import Recording, moments_ms, read_curve, read_requests, recorded_in
    from latfit.workload.requests import (
        Constant,
        LengthDistribution,
        PrefixBlocks,
        Requests,
        Resampled,
        make_requests as make_requests,
        parse_lengths,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
