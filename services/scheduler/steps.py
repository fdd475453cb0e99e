"""A step on its way: what is remembered of a plan that was sent, what came back for it, and what a slot starts with."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.scheduler.requests import Request
from shared.errors import ProtocolError
from shared.protocol.logprobs import NO_LOGPROBS, NO_TOP_ID, Logprobs
from shared.protocol.plan import ADMISSION, FAILED_ROW, NO_STOP_ID, Int32s, Plan, SlotFlag


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
    def late_us(self) -> int:
        """How long the device had nothing to do because this plan came late; the rest of its idle time is its own."""
        received_after_end = self.end_us - self.start_us + self.idle_us - self.hold_us  # of the step before
        return min(max(received_after_end, 0), self.idle_us)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A plan whose result is not in."""

    slots: Int32s  # [rows]
    samples: NDArray[np.bool_]  # [rows] that yield a token
    decode_rows: int
    prefill_tokens: int
    iterations: int
    estimate_us: int
    sent_at: float
    followed: bool  # sent while another plan was outstanding
    jumps: bool  # may run before plans that were sent earlier

    def check(self, result: StepResult, vocab_size: int) -> None:
        """Raises ProtocolError when `result` cannot be this plan's."""
        iterations, rows = result.ids.shape
        if not 1 <= iterations <= self.iterations or rows != len(self.slots) or len(result.slot_epochs) != rows:
            raise ProtocolError(
                f"the result of plan {result.plan_id} has the shape {result.ids.shape} and {len(result.slot_epochs)} slot epochs"
            )
        if rows and not FAILED_ROW <= result.ids.min() <= result.ids.max() < vocab_size:
            raise ProtocolError(f"the result of plan {result.plan_id} has ids from {result.ids.min()} to {result.ids.max()}")
        records = result.logprobs
        if len(records) and not 0 <= records["row"].min() <= records["row"].max() < rows:
            raise ProtocolError(f"the result of plan {result.plan_id} has log-probabilities of rows that the plan has not")
        if len(records) and not NO_TOP_ID <= records["top_ids"].min() <= records["top_ids"].max() < vocab_size:
            raise ProtocolError(f"the result of plan {result.plan_id} has log-probabilities of ids that the vocabulary has not")


def admission(slot: int, epoch: int, request: Request) -> NDArray[np.void]:
    """The record `[1]` that makes `slot` the request's, for this use of it."""
    sampling = request.sampling
    record = np.zeros(1, dtype=ADMISSION)
    record["slot"] = slot
    record["epoch"] = epoch
    record["flags"] = (
        SlotFlag.IGNORE_EOS * request.ignore_eos
        | SlotFlag.PENALTIES * sampling.penalises
        | SlotFlag.BIASES * bool(sampling.biases)
        | SlotFlag.LOGPROBS * (request.scores is not None and request.scores.top is not None)
    )
    record["prompt_length"] = len(request.prompt_ids)
    record["presence"] = sampling.presence_penalty
    record["frequency"] = sampling.frequency_penalty
    record["repetition"] = sampling.repetition_penalty
    record["min_length"] = len(request.prompt_ids) + request.min_tokens
    record["max_length"] = request.max_length
    record["seed_low"] = sampling.seed & 0xFFFFFFFF
    record["seed_high"] = sampling.seed >> 32 & 0xFFFFFFFF
    record["temperature"] = sampling.temperature
    record["top_k"] = sampling.top_k
    record["top_p"] = sampling.top_p
    record["min_p"] = sampling.min_p
    record["stop_ids"] = NO_STOP_ID
    record["stop_ids"][0, : len(request.stop_ids)] = request.stop_ids
    return record


def add_biases(plan: Plan, slot: int, biases: tuple[tuple[int, float], ...]) -> None:
    """Of a slot that the plan admits."""
    ids, values = zip(*biases, strict=True)
    plan.bias_slots = np.concatenate((plan.bias_slots, np.full(len(ids), slot, dtype=np.int32)))
    plan.bias_indexes = np.concatenate((plan.bias_indexes, np.arange(len(ids), dtype=np.int32)))
    plan.bias_ids = np.concatenate((plan.bias_ids, np.array(ids, dtype=np.int32)))
    plan.bias_values = np.concatenate((plan.bias_values, np.array(values, dtype=np.float32).view(np.int32)))
