"""What requests with penalties or biases need of the device: how often a slot's ids have come, and what each costs.

Which ids a slot's pages hold is kept beside their keys and values. So counts are made anew, from what is on the device, whenever a
prefill ends: after a hit in the prefix cache, a preemption or a move as after the first, and nothing of it crosses a wire.

S slots and one of nobody, L columns of logits: the vocabulary ids from `first` on, B rows, A admissions.
"""

import torch
from torch import Tensor

from kernels.counts import Held, count, recount
from kernels.penalties import penalise
from services.worker.engine.slots import column_of, floats_of
from shared.protocol.plan import MAX_BIASES, SlotFlag

NO_BIAS = -1


class Penalties:
    """By slot. Counts take `4 * L` bytes a slot, the list of these `4 * min(L, max_length + 1)`; on a CPU only what is written."""

    def __init__(self, slots: int, columns: int, first: int, max_length: int, device: torch.device) -> None:
        """max_length: tokens of a sequence."""
        self.held = Held.nothing(slots, columns, max_length + 1, device)  # a prompt as long as that still yields a token
        self.counted = torch.zeros(slots, dtype=torch.bool, device=device)  # as `Feature.PENALTIES` on the host
        self.presence, self.frequency = torch.zeros(2, slots, device=device)
        self.repetition = torch.ones(slots, device=device)
        self.prompt_length = torch.zeros(slots, dtype=torch.int32, device=device)
        self.bias_ids = torch.full((slots, MAX_BIASES), NO_BIAS, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(slots, MAX_BIASES, device=device)
        self._first = first

    def admit(self, records: Tensor) -> None:
        """records `[A, 32]` int32, see `shared.protocol.plan.ADMISSION`. Resets everything of the slots but the counts."""
        slots, flags = column_of(records, "slot").long(), column_of(records, "flags")
        penalised = (flags & SlotFlag.PENALTIES) != 0
        self.counted[slots] = penalised | ((flags & SlotFlag.BIASES) != 0)
        self.presence[slots] = floats_of(records, "presence").where(penalised, 0.0)
        self.frequency[slots] = floats_of(records, "frequency").where(penalised, 0.0)
        self.repetition[slots] = floats_of(records, "repetition").where(penalised, 1.0)
        self.prompt_length[slots] = column_of(records, "prompt_length")
        self.bias_ids.index_fill_(0, slots, NO_BIAS)

    def bias(self, slots: Tensor, indexes: Tensor, ids: Tensor, values: Tensor) -> None:
        """The plan's biases, int32; of slots that it admits."""
        self.bias_ids[slots.long(), indexes.long()] = ids
        self.bias_values[slots.long(), indexes.long()] = values.contiguous().view(torch.float32)

    def recount(self, slots: Tensor, lengths: Tensor, yields: Tensor, token_ids: Tensor, page_table: Tensor, page_size: int) -> None:
        """Counts what the pages of prefill rows hold, of those that are counted and yield a token; see `kernels.counts.recount`."""
        own = self.held, self.counted, slots, lengths, yields, self.prompt_length
        recount(*own, token_ids, page_table, page_size, self._first)

    def apply(self, logits: Tensor, slots: Tensor) -> None:
        """Changes logits `[B, L]` in place; slots `[B]` int32."""
        own = self.held, self.presence, self.frequency, self.repetition, self.bias_ids, self.bias_values
        penalise(logits, slots, *own, self._first)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """tokens `[B]` int32 were generated; negative: none."""
        count(self.held, self.counted, slots, tokens, self._first)
