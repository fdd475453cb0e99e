"""The state of a group's slots on the device: it advances there, so that plans can be sent before results are known.

S slots, A admissions, B rows.
"""

import torch
from torch import Tensor

from kernels.advance import advance
from kernels.early_end import forbid_early_end
from services.worker.engine.features import wants_of
from services.worker.engine.sampling import Sampling
from services.worker.engine.sizes import aligned
from shared.protocol.plan import ADMISSION, MAX_STOP_IDS, NO_STOP_ID, SlotFlag

_COLUMN = {name: offset // 4 for name, (_, offset) in ((name, ADMISSION.fields[name][:2]) for name in ADMISSION.names or ())}  # type: ignore[index]


# What a slot keeps of an admission as it is, in the order of the record: one launch enters all of it.
_KEPT = ("min_length", "max_length", "seed_low", "seed_high", "temperature", "top_k", "top_p", "min_p")
_KEPT_COLUMNS = slice(_COLUMN[_KEPT[0]], _COLUMN[_KEPT[0]] + len(_KEPT))
assert [_COLUMN[name] for name in _KEPT] == list(range(_KEPT_COLUMNS.start, _KEPT_COLUMNS.stop))


def column_of(records: Tensor, name: str) -> Tensor:
    """A field of ADMISSION, of records `[A, 32]` int32 -> `[A]` int32."""
    return records[:, _COLUMN[name]]


def floats_of(records: Tensor, name: str) -> Tensor:
    """A field of ADMISSION that is a float32 -> `[A]`."""
    return column_of(records, name).contiguous().view(torch.float32)


def asks_for_more(records: Tensor) -> Tensor:
    """Which of `[A, 32]` int32 ask for more than a temperature, and so for their logits, `[A]` bool."""
    filtered, short, changed = wants_of(lambda name: (floats_of if ADMISSION[name].kind == "f" else column_of)(records, name))
    asks: Tensor = filtered | short | changed
    return asks


class Slots:
    """Structure of arrays by slot. A slot that nobody was admitted to is done."""

    def __init__(self, slots: int, pages_per_slot: int, eos_ids: Tensor) -> None:
        """eos_ids `[E]` int32, on the device of the state. One more slot is made, that nobody is admitted to."""
        self.padding = slots  # the slot of rows that only fill up a captured batch: done, so they write to the scratch page
        slots += 1

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=eos_ids.device)

        self.eos_ids = eos_ids
        self.page_table = ints(slots, pages_per_slot)
        row = aligned(slots)  # a kernel is compiled once for all that begins where it should
        self._progress = ints(2, row)[:, :slots]
        self.length = self._progress[0]  # tokens whose keys and values are in the cache
        self.last_token = self._progress[1]  # what the next decode row computes, at position `length`
        self.done = torch.ones(slots, dtype=torch.bool, device=eos_ids.device)
        self._kept = ints(len(_KEPT) + 1, row)[:, :slots]
        self.asks = self._kept[-1]  # 1: for more than a temperature, in all that its request yields; follows from the others
        self.min_length, self.max_length = self._kept[0], self._kept[1]
        self._sampling = self._kept[_KEPT.index("temperature") :]  # a step takes the columns of its rows in one launch
        self.ignore_eos = torch.zeros_like(self.done)
        self.stop_ids = ints(slots, MAX_STOP_IDS).fill_(NO_STOP_ID)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=eos_ids.device)
        self._seed_words = self.seed.view(torch.int32).view(slots, 2)  # low, high

    def reset(self) -> None:
        """Forgets every request; what lies in the page tables is never read again."""
        self.done.fill_(True)

    def release(self, slots: Tensor) -> None:
        self.done.index_fill_(0, slots.long(), True)

    def admit(self, records: Tensor) -> None:
        """records `[A, 32]` int32, see `shared.protocol.plan.ADMISSION`. Resets everything of the slots."""
        slots = column_of(records, "slot").long()
        seed, stop_ids = _COLUMN["seed_low"], _COLUMN["stop_ids"]
        self.page_table.index_fill_(0, slots, 0)
        self._progress.index_fill_(1, slots, 0)
        self.done.index_fill_(0, slots, False)
        self._kept[:-1].index_copy_(1, slots, records[:, _KEPT_COLUMNS].T)
        self.asks.index_copy_(0, slots, asks_for_more(records).int())
        self._seed_words.index_copy_(0, slots, records[:, seed : seed + 2])
        self.stop_ids.index_copy_(0, slots, records[:, stop_ids : stop_ids + MAX_STOP_IDS])
        self.ignore_eos.index_copy_(0, slots, (column_of(records, "flags") & SlotFlag.IGNORE_EOS).bool())

    def grant(self, slots: Tensor, indexes: Tensor, pages: Tensor) -> None:
        self.page_table[slots.long(), indexes.long()] = pages

    def forbid_early_end(self, logits: Tensor, slots: Tensor, lengths: Tensor, first: int = 0) -> None:
        """Sets the logits of ids that would end a row below its least length to -inf; lengths `[B]` as in `advance`.

        logits `[B, L]`: of the vocabulary ids from `first` on.
        """
        forbid_early_end(logits, self.min_length, self.ignore_eos, self.stop_ids, self.eos_ids, slots, lengths, first)

    def sampling(self, slots: Tensor, positions: Tensor) -> Sampling:
        """How rows are sampled; a row's noise depends on its seed and the position `[B]` of the token in its sequence only."""
        temperature, top_k, top_p, min_p, asks = self._sampling.index_select(1, slots)
        temperature, top_p, min_p = (row.view(torch.float32) for row in (temperature, top_p, min_p))
        return Sampling(temperature, top_k, top_p, min_p, self.seed.index_select(0, slots), positions, asks)

    def advance(self, slots: Tensor, lengths: Tensor, tokens: Tensor, samples: Tensor) -> Tensor:
        """After a step: tokens `[B]` int32 sampled, lengths `[B]` int32 now in the cache, samples `[B]` bool the rows that yield one.

        Returns ids `[B]` int32: the token, -1 where the row was done or yields none, -2 where its logits were not finite.
        """
        return advance(
            self.length,
            self.last_token,
            self.done,
            self.max_length,
            self.ignore_eos,
            self.stop_ids,
            self.eos_ids,
            slots,
            lengths,
            tokens,
            samples,
        )
