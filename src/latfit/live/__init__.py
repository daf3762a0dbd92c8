"""Route live requests by the simulator's policies."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.live.bench import run_policies, stand_ins
    from latfit.live.engines import ByRows, openvino_run as openvino_run, torch_run as torch_run
    from latfit.live.executor import (
        Abandoned as Abandoned,
        AsyncExecutor as AsyncExecutor,
        Executor as Executor,
        ExecutorFailed as ExecutorFailed,
        ExecutorLost as ExecutorLost,
        ExecutorTimedOut as ExecutorTimedOut,
        ProcessExecutor as ProcessExecutor,
        ThreadExecutor as ThreadExecutor,
    )
    from latfit.live.front.exchange import Exchange, HttpExecutor, HttpTimeouts
    from latfit.live.front.front import Front, FrontOptions
    from latfit.live.front.server import FrontServer
    from latfit.live.learner import BestForTail as BestForTail, Learner as Learner
    from latfit.live.metrics import LearnerMetrics as LearnerMetrics, RouterMetrics as RouterMetrics
    from latfit.live.pauses import short_pauses as short_pauses
    from latfit.live.promise import Promise as Promise, PromiseMonitor as PromiseMonitor
    from latfit.live.replay import Compared, precisely
    from latfit.live.router import (
        Closed as Closed,
        NoPath as NoPath,
        QueueFull as QueueFull,
        Router as Router,
        RouterOptions as RouterOptions,
    )
    from latfit.live.steps import DecodeSteps
    from latfit.live.tracing import RequestSpans as RequestSpans, sent_by
    from latfit.live.triton import TritonExecutor as TritonExecutor, TritonModel as TritonModel
    from latfit.live.waiting import Request as Request

__all__, __getattr__, __dir__ = face(__name__, __file__)
