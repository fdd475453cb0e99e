"""A step on its way: what is remembered of a plan that was sent, what came back for it, and what a slot starts with."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.scheduler.requests import Request
from services.scheduler.slots import Rows
from shared.errors import ProtocolError
from shared.protocol.logprobs import NO_LOGPROBS, NO_TOP_ID, Logprobs
from shared.protocol.plan import ADMISSION, FAILED_ROW, MAX_STOP_IDS, NO_STOP_ID, Int32s, Plan, SlotFlag

_NO_STOP_IDS = (NO_STOP_ID,) * MAX_STOP_IDS


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back for a plan; times in microseconds of the worker's own clock."""

    plan_id: int
    ids: Int32s  # [iterations, rows]
    slot_epochs: Int32s  # [rows]
    hold_us: int  # result sent - plan received
    start_us: int
    end_us: int
    idle_us: int  # before start_us
    logprobs: Logprobs = field(default_factory=NO_LOGPROBS.copy)  # of rows that ask for them

    @property
    def step_us(self) -> int:
        """Of one iteration."""
        return max((self.end_us - self.start_us) // len(self.ids), 1)

    @property
    def late_us(self) -> int:
        """How long the device had nothing to do because this plan came late; the rest of its idle time is its own."""
        received_after_end = self.end_us - self.start_us + self.idle_us - self.hold_us  # of the step before
        return min(max(received_after_end, 0), self.idle_us)


@dataclass(slots=True)
class Outstanding:
    """A plan whose result is not in."""

    slots: Rows  # [rows]
    samples: NDArray[np.bool_]  # [rows] that yield a token
    decode_rows: int
    prefill_tokens: int
    iterations: int
    estimate_us: int
    sent_at: float
    jumps: bool  # may run before plans that were sent earlier
    followed: bool = False  # sent while another plan was outstanding

    def check(self, result: StepResult, vocab_size: int) -> tuple[int, int]:
        """Returns the least and the greatest id. Raises ProtocolError when `result` cannot be this plan's."""
        iterations, rows = result.ids.shape
        if not 1 <= iterations <= self.iterations or rows != len(self.slots) or len(result.slot_epochs) != rows:
            raise ProtocolError(
                f"the result of plan {result.plan_id} has the shape {result.ids.shape} and {len(result.slot_epochs)} slot epochs"
            )
        least, greatest = int(result.ids.min()), int(result.ids.max())
        if not FAILED_ROW <= least <= greatest < vocab_size:
            raise ProtocolError(f"the result of plan {result.plan_id} has ids from {least} to {greatest}")
        records = result.logprobs
        if len(records) and not 0 <= records["row"].min() <= records["row"].max() < rows:
            raise ProtocolError(f"the result of plan {result.plan_id} has log-probabilities of rows that the plan has not")
        if len(records) and not NO_TOP_ID <= records["top_ids"].min() <= records["top_ids"].max() < vocab_size:
            raise ProtocolError(f"the result of plan {result.plan_id} has log-probabilities of ids that the vocabulary has not")
        return least, greatest


def admissions(admitted: list[tuple[int, int, Request]]) -> NDArray[np.void]:
    """The records `[len(admitted)]` that make slots the requests', for this use of them: (slot, epoch, request) each."""
    return np.array([_admission(*each) for each in admitted], dtype=ADMISSION)


def _admission(slot: int, epoch: int, request: Request) -> tuple[object, ...]:
    """The fields of ADMISSION, in order."""
    sampling = request.sampling
    flags = (
        SlotFlag.IGNORE_EOS * request.ignore_eos
        | SlotFlag.PENALTIES * sampling.penalises
        | SlotFlag.BIASES * bool(sampling.biases)
        | SlotFlag.LOGPROBS * (request.scores is not None and request.scores.top is not None)
    )
    return (
        slot,
        epoch,
        flags,
        len(request.prompt_ids) + request.min_tokens,
        request.max_length,
        sampling.seed & 0xFFFFFFFF,
        sampling.seed >> 32 & 0xFFFFFFFF,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        len(request.prompt_ids),
        0,
        (*request.stop_ids, *_NO_STOP_IDS[len(request.stop_ids) :]),
    )


def add_grants(plan: Plan, slots: Int32s, indexes: Int32s, pages: Int32s) -> None:
    """Page-table entries (slot, index), each with its page."""
    if len(plan.grant_slots):
        slots, indexes, pages = (
            np.concatenate(both) for both in ((plan.grant_slots, slots), (plan.grant_indexes, indexes), (plan.grant_pages, pages))
        )
    plan.grant_slots, plan.grant_indexes, plan.grant_pages = slots, indexes, pages


def add_biases(plan: Plan, slot: int, biases: tuple[tuple[int, float], ...]) -> None:
    """Of a slot that the plan admits."""
    ids, values = zip(*biases, strict=True)
    plan.bias_slots = np.concatenate((plan.bias_slots, np.full(len(ids), slot, dtype=np.int32)))
    plan.bias_indexes = np.concatenate((plan.bias_indexes, np.arange(len(ids), dtype=np.int32)))
    plan.bias_ids = np.concatenate((plan.bias_ids, np.array(ids, dtype=np.int32)))
    plan.bias_values = np.concatenate((plan.bias_values, np.array(values, dtype=np.float32).view(np.int32)))
