"""Requests: how they arrive, how long they are, recorded ones."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.workload.arrivals import (
        ArrivalProcess as ArrivalProcess,
        Dealt as Dealt,
        Gamma as Gamma,
        Piecewise as Piecewise,
        Poisson as Poisson,
        bursts as bursts,
    )
    from latfit.workload.lengths import (
        Constant as Constant,
        LengthDistribution as LengthDistribution,
        Resampled as Resampled,
        fit_lengths as fit_lengths,
    )
    from latfit.workload.load import (
        ClosedLoad as ClosedLoad,
        Load as Load,
        OpenLoad as OpenLoad,
        RecordedLoad as RecordedLoad,
        RequestClass as RequestClass,
        draw_classes as draw_classes,
    )
    from latfit.workload.parse import (
        parse_arrival_process as parse_arrival_process,
        parse_class as parse_class,
        parse_lengths as parse_lengths,
    )
    from latfit.workload.random_streams import (
        ARRIVALS as ARRIVALS,
        CLASSES as CLASSES,
        LENGTHS as LENGTHS,
        SERVICE as SERVICE,
        Streams as Streams,
    )
    from latfit.workload.recordings import (
        Recording as Recording,
        moments_ms as moments_ms,
        read_curve as read_curve,
        read_requests as read_requests,
        recorded_in as recorded_in,
    )
    from latfit.workload.requests import (
        PrefixBlocks as PrefixBlocks,
        Requests as Requests,
        make_requests as make_requests,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
