"""How requests end: what a gateway is told, and the words for it. What depends on the request is told where it is found."""

from dataclasses import dataclass

from shared.protocol.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    FINISH_REASON_ERROR,
    FINISH_REASON_STOP,
    FINISH_REASON_UNAVAILABLE,
    REJECT_REASON_TOO_LONG,
    REJECT_REASON_UNAVAILABLE,
    FinishReason,
    RejectReason,
)

MAX_UNPLANNED_MOVES = 3  # of a request: one that takes along every group that computes it must end


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended that was accepted."""

    reason: FinishReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a request was not accepted."""

    reason: RejectReason
    detail: str
    retry_after_ms: int = 0


End = Finished | Rejected

CANCELLED = Finished(FINISH_REASON_CANCELLED)
STOPPED = Finished(FINISH_REASON_STOP, "a stop string")
SUPERSEDED = Finished(FINISH_REASON_CANCELLED, "a newer attempt took over")
OUT_OF_TIME = Finished(FINISH_REASON_DEADLINE, "the deadline passed")
FAILED = Finished(FINISH_REASON_ERROR, "the model's output was not finite")
STOPPED_EARLY = Finished(FINISH_REASON_ERROR, "the worker ended the request for a reason that the scheduler does not know")
LOST = Finished(FINISH_REASON_UNAVAILABLE, "the worker was lost, and none took over in time")
LOST_TOO_OFTEN = Finished(
    FINISH_REASON_UNAVAILABLE, f"the worker was lost, as were {MAX_UNPLANNED_MOVES} workers or schedulers before it that had the request"
)
TOO_LONG = Rejected(REJECT_REASON_TOO_LONG, "prompt and completion exceed the KV cache of every worker group")
UNAVAILABLE = Rejected(REJECT_REASON_UNAVAILABLE, "no worker group is ready")
