"""Between host and device: plans on their way there, results on their way back. Nothing here waits for the device.

S slots, B rows.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.interface import LAUNCH_AHEAD
from services.worker.engine.logprobs import COLUMNS, ids_of, records_of
from services.worker.engine.sections import Sections, row_sections
from services.worker.engine.sizes import Prefill, PrefillSizes, aligned, launched_rows
from shared.protocol.logprobs import Logprobs
from shared.protocol.plan import MAX_PLAN_BYTES, Int32s, Plan

RESULTS = LAUNCH_AHEAD + 2  # one is read while the launched ones are written


class PlanStaging:
    """The plan on the device, at fixed addresses: `words` as they came, and its rows once more, filled up for captured steps.

    Two pinned buffers in turn, each used again when its copy is done: the device reads one while the host writes the other.

        prefill ids | prefill slots, starts, lengths, flags | decode slots | words
    """

    def __init__(self, slots: int, max_step_tokens: int, sizes: PrefillSizes, padding: int, device: torch.device) -> None:
        """sizes: what prefill is filled up to. padding: the slot of rows that do that."""
        self._prefill_sizes, self._padding = sizes, padding
        ids = max(aligned(max_step_tokens), *(size.tokens for size in sizes.captured), 0)
        self._sizes = [ids, *[launched_rows(slots)] * 4, aligned(slots), MAX_PLAN_BYTES // 4]
        self._device = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(sum(self._sizes), dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._arrays = [np.split(each.numpy(), np.cumsum(self._sizes)[:-1]) for each in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self.loaded: Int32s | None = None  # the words of the plan that is on the device
        self.filled = Prefill(0, 0)  # what its prefill is filled up to
        self.prefill_ids, *prefill, self.decode_slots, self.words = self._device.split(self._sizes)  # int32
        self.prefill = dict(zip(("slots", "starts", "lengths", "flags"), prefill, strict=True))

    def load_nobody(self, prefill_tokens: int) -> None:
        """Rows of nobody, one of them with so many prefill ids; 0: none."""
        self.loaded = None
        for array, value in ((self.decode_slots, self._padding), (self.prefill["slots"], self._padding), (self.prefill["lengths"], 0)):
            array.fill_(value)
        self.prefill["lengths"][:1].fill_(prefill_tokens)

    def sections(self, decode_rows: int, prefill: Prefill) -> Sections:
        """The plan's rows, filled up to these numbers."""
        slots, starts, lengths, flags = (self.prefill[name][: prefill.rows] for name in ("slots", "starts", "lengths", "flags"))
        sections = row_sections(self.decode_slots[:decode_rows], slots, starts, lengths, self.prefill_ids[: prefill.tokens])
        return {**sections, "prefill_flags": flags}

    def load(self, plan: Plan, words: Int32s) -> None:
        """Makes this the plan that later launches read: one copy. words: the whole of it."""
        self.loaded = words
        self._turn ^= 1
        self._copied[self._turn].synchronize()  # of the plan before the last: done long ago, but for a host that is far ahead
        ids, slots, starts, lengths, flags, decode_slots, all_words = self._arrays[self._turn]
        decodes, prefills = len(plan.decode_slots), len(plan.prefill_slots)
        begin = sum(self._sizes[:-2])
        if prefills:
            begin = 0
            self.filled = self._prefill_sizes.of(prefills, len(plan.prefill_ids))
            for array, values, rest in (
                (ids, plan.prefill_ids, 0),
                (slots, plan.prefill_slots, self._padding),
                (starts, plan.prefill_starts, 0),
                (lengths, plan.prefill_lengths, 0),
                (flags, plan.prefill_flags, 0),
            ):
                array[: len(values)] = values
                array[len(values) :] = rest
            lengths[prefills] = self.filled.tokens - len(plan.prefill_ids)  # a row of nobody takes what is left
        decode_slots[:decodes] = plan.decode_slots
        decode_slots[decodes:] = self._padding
        all_words[: len(words)] = words
        end = sum(self._sizes[:-1]) + len(words)
        self._device[begin:end].copy_(self._pinned[self._turn][begin:end], non_blocking=True)
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
