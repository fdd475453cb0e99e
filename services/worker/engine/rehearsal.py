"""Steps of nobody, run before the first plan comes: they compile the kernels of all shapes, and show how much memory a step takes.

Their rows are of the slot that nobody has, so all that they write is in the scratch page.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.features import VARIANTS, Feature
from services.worker.engine.interface import Progress
from services.worker.engine.sections import Sections, row_sections
from services.worker.engine.staging import ALIGNED, aligned, prefill_shape


class Rehearsal:
    def __init__(
        self,
        step: Callable[[Sections, int, Feature], Tensor],
        nobody: int,
        slots: int,
        max_length: int,
        max_step_tokens: int,
        device: torch.device,
    ) -> None:
        """step: the sections of a step, its longest prefill chunk, and its features. nobody: the slot."""
        self._step, self._nobody, self._device = step, nobody, device
        self._slots, self._max_length, self._max_step_tokens = slots, max_length, max_step_tokens

    def compile(self, progress: Progress) -> None:
        """Runs every shape that a step with prefill is launched in."""
        largest = aligned(self._max_step_tokens)
        sizes = sorted({aligned(1 << power) for power in range(self._max_step_tokens.bit_length())} | {largest})
        rows = sorted({prefill_shape(count, largest, self._max_length)[0] for count in range(1, self._slots + 1)})
        shapes = [(count, 0, largest) for count in rows]
        shapes += [(rows[0], decodes, size) for decodes in (0, ALIGNED, aligned(self._slots)) for size in sizes]
        for number, shape in enumerate(shapes):
            progress("warming up", number / len(shapes))
            for features in VARIANTS[-1:] if number else VARIANTS:
                self.run(*shape, features)

    def step_bytes(self) -> int:
        """Device memory that the largest steps take while they run."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(ALIGNED, 0, aligned(self._max_step_tokens), VARIANTS[-1])
        self.run(0, self._slots, 0, VARIANTS[-1])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def run(self, prefill_rows: int, decodes: int, tokens: int, features: Feature) -> None:
        """One step with so many rows, and its prompt tokens in the first of those with prefill, or in more where these do not hold them."""
        whole, rest = divmod(tokens, self._max_length)
        lengths = np.zeros(max(prefill_rows, whole + bool(rest)), dtype=np.int32)
        lengths[:whole] = self._max_length
        lengths[whole : whole + bool(rest)] = rest
        chunks = torch.from_numpy(lengths).to(self._device)
        slots, ids = torch.full_like(chunks, self._nobody), torch.zeros(tokens, dtype=torch.int32, device=self._device)
        decode_slots = torch.full((decodes,), self._nobody, dtype=torch.int32, device=self._device)
        self._step(row_sections(decode_slots, slots, torch.zeros_like(chunks), chunks, ids), int(lengths.max(initial=0)), features)
