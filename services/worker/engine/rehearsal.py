"""Steps of nobody, run before the first plan comes: they compile the kernels of all shapes, and show how much memory a step takes.

Their rows are of the slot that nobody has, so all that they write is in the scratch page.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.engine.features import NO_FEATURES, VARIANTS, Feature
from services.worker.engine.interface import Progress
from services.worker.engine.sections import Sections, row_sections
from services.worker.engine.sizes import ALIGNED, MOST_ROWS, SMALL, aligned, launched_rows

BUSY = 2.0  # a step that computes for so many times as long as its launches take gains nothing from a graph


class Rehearsal:
    def __init__(
        self,
        step: Callable[[Sections, int, Feature], Tensor],
        nobody: int,
        slots: int,
        max_step_tokens: int,
        device: torch.device,
    ) -> None:
        """step: the sections of a step, its longest prefill chunk, and its features. nobody: the slot."""
        self._step, self._nobody, self._device = step, nobody, device
        self._slots, self._max_step_tokens = slots, max_step_tokens

    def compile(self, progress: Progress) -> None:
        """Runs every shape that a step with prefill is launched in."""
        largest = aligned(self._max_step_tokens)
        sizes = sorted({aligned(1 << power) for power in range(self._max_step_tokens.bit_length())} | {largest})
        rows = sorted({launched_rows(count) for count in range(1, self._slots + 1)})
        shapes = [(count, 0, largest) for count in rows]
        shapes += [(rows[0], decodes, size) for decodes in (0, ALIGNED, aligned(self._slots)) for size in sizes]
        for number, shape in enumerate(shapes):
            progress("warming up", number / len(shapes))
            for features in VARIANTS[-1:] if number else VARIANTS:
                self.run(*shape, features)

    def tokens_worth_capturing(self) -> int:
        """Prompt tokens up to which a step's launches hold it up, found by trying; larger steps keep the device busy as they are.

        Every rank tries the same steps, whatever it finds: they add up together.
        """
        most, tokens = None, SMALL[-1]
        while tokens < self._max_step_tokens:
            torch.cuda.synchronize()
            begin_s = time.monotonic()
            self.run(ALIGNED, 0, tokens, NO_FEATURES)
            launched_s = time.monotonic()
            torch.cuda.synchronize()
            if most is None and time.monotonic() - begin_s > BUSY * (launched_s - begin_s):
                most = tokens
            tokens *= 2
        return most or self._max_step_tokens

    def step_bytes(self) -> int:
        """Device memory that the largest steps take while they run."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(min(MOST_ROWS, launched_rows(self._slots)), self._slots, aligned(self._max_step_tokens), VARIANTS[-1])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def run(self, prefill_rows: int, decodes: int, tokens: int, features: Feature) -> None:
        """One step with so many rows, the first of those with prefill having all prompt tokens."""

        def ints(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=self._device)

        lengths = ints(prefill_rows, 0)
        lengths[:1].fill_(tokens)
        sections = row_sections(
            ints(decodes, self._nobody), ints(prefill_rows, self._nobody), ints(prefill_rows, 0), lengths, ints(tokens, 0)
        )
        self._step(sections, tokens, features)
