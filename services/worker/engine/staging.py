"""Between host and device: plans on their way there, results on their way back. Nothing here waits for the device.

S slots, B rows.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.interface import LAUNCH_AHEAD
from services.worker.engine.logprobs import COLUMNS, ids_of, records_of
from shared.protocol.logprobs import Logprobs
from shared.protocol.plan import MAX_PLAN_BYTES, Int32s

RESULTS = LAUNCH_AHEAD + 2  # one is read while the launched ones are written


class PlanStaging:
    """The plan on the device, at fixed addresses: `words` as they came, and its decode slots, filled up for captured batches.

    Two pinned buffers in turn, each used again when its copy is done: the device reads one while the host writes the other.
    """

    def __init__(self, slots: int, padding: int, device: torch.device) -> None:
        """padding: the slot of rows that fill up a batch."""
        size = slots + MAX_PLAN_BYTES // 4
        self._device = torch.empty(size, dtype=torch.int32, device=device)
        self._pinned = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._arrays = [each.numpy() for each in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._slots, self._padding = slots, padding
        self.loaded: Int32s | None = None  # the words of the plan that is on the device
        self.decode_slots = self._device[:slots]  # [S] int32
        self.words = self._device[slots:]  # int32

    def load(self, words: Int32s, decode_slots: Int32s) -> None:
        """Makes this the plan that later launches read: one copy."""
        self.loaded = words
        self._turn ^= 1
        self._copied[self._turn].synchronize()  # of the plan before the last: done long ago, but for a host that is far ahead
        array, end = self._arrays[self._turn], self._slots + len(words)
        array[: len(decode_slots)] = decode_slots
        array[len(decode_slots) : self._slots] = self._padding
        array[self._slots : end] = words
        self._device[:end].copy_(self._pinned[self._turn][:end], non_blocking=True)
        self._copied[self._turn].record()


class ResultRing:
    """Pinned rows that the device writes, and an event for each: how the host learns that it did, and of faults before."""

    def __init__(self, slots: int) -> None:
        self._rows = torch.empty(RESULTS, slots * COLUMNS, dtype=torch.int32, pin_memory=True)
        self._events = [torch.cuda.Event() for _ in range(RESULTS)]
        self._turn = 0

    def send(self, result: Tensor, wanted: NDArray[np.bool_], scores: Tensor | None = None) -> "RingFlight":
        """result, ids `[B]` int32 or a table of them, and scores, a table, as queued on the current stream; see `RingFlight.logprobs`."""
        self._turn = (self._turn + 1) % RESULTS
        row, event = self._rows[self._turn, : result.numel()].view(result.shape), self._events[self._turn]
        row.copy_(result, non_blocking=True)
        pinned = None
        if scores is not None:
            pinned = torch.empty(scores.shape, dtype=torch.int32, pin_memory=True)
            pinned.copy_(scores, non_blocking=True)
        event.record()
        return RingFlight(row, event, wanted, pinned)


class RingFlight:
    def __init__(self, row: Tensor, event: torch.cuda.Event, wanted: NDArray[np.bool_], scores: Tensor | None) -> None:
        self._row, self._event, self._wanted, self._scores = row, event, wanted, scores
        self._result: Int32s = np.empty(0, dtype=np.int32)

    def landed(self) -> bool:
        done: bool = self._event.query()
        return done

    def ids(self) -> Int32s:
        self._event.synchronize()
        self._result = np.array(self._row.numpy())
        return ids_of(self._result)

    def logprobs(self) -> Logprobs:
        return records_of(self._result, self._wanted, None if self._scores is None else self._scores.numpy())
