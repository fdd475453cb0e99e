"""Steps of nobody, run before the first plan comes: they compile the kernels of all shapes, and show how much memory a step takes.

Their rows are of the slot that nobody has, so all that they write is in the scratch page.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.compilation import compile_noted, noting
from services.worker.engine.features import NO_FEATURES, Feature
from services.worker.engine.interface import Progress
from services.worker.engine.sections import Sections, row_sections
from services.worker.engine.sizes import ALIGNED, MOST_ROWS, SMALL, PrefillSizes, aligned, decode_sizes, launched_rows, most_rows

logger = logging.getLogger(__name__)

TRIES = 2  # of a step: what interrupts a launch makes it no faster
BUSY = 2.0  # a step that computes for so many times as long as its launches take gains nothing from a graph


class Rehearsal:
    def __init__(
        self,
        step: Callable[[Sections, int, Feature], Tensor],
        variants: Sequence[Feature],
        nobody: int,
        slots: int,
        max_step_tokens: int,
        device: torch.device,
    ) -> None:
        """step: the sections of a step, its longest prefill chunk, and its features. variants: of these. nobody: the slot."""
        self._step, self._variants, self._nobody, self._device = step, variants, nobody, device
        self._slots, self._max_step_tokens = slots, max_step_tokens

    def prepare(self, threads: int, progress: Progress) -> None:
        """Compiles in parallel nearly all that later steps launch, before any of them: what a dry run of their shapes tells."""
        progress("compiling kernels", 0.0)
        begin_s = time.monotonic()
        with noting() as noted:
            for rows, decodes, tokens in self._shapes:
                if not decodes or tokens == aligned(self._max_step_tokens):
                    self.run(rows, decodes, tokens, self._variants[-1])
            for rows, features in self._sampled:
                self._run_rows(rows, features)
            for decodes in decode_sizes(self._slots):
                self.run(0, decodes, 0, self._variants[-1])
                self.run(ALIGNED, decodes, ALIGNED, self._variants[-1])
            for size in PrefillSizes(self._slots, min(self._max_step_tokens, SMALL[-1])).captured:
                self.run(size.rows, 0, size.tokens, self._variants[-1])
        noted_s = time.monotonic()
        compiled = compile_noted(noted, self._device, threads, lambda part: progress("compiling kernels", part))
        logger.info(
            "%d kernels, of which %d were compiled by %d threads, the others in Triton's cache: %.2f s to find them, %.2f s to bring them",
            len(noted), compiled, threads, noted_s - begin_s, time.monotonic() - noted_s,
        )  # fmt: skip

    @property
    def _sampled(self) -> list[tuple[int, Feature]]:
        """Rows and features of steps that sample in every way, the largest first: what they allocate holds the others.

        A head that chooses is compiled for each of its entries, whose rows are powers of two: up to as many as any step has.
        """
        if Feature.SAMPLING not in self._variants:
            return [(self._slots, features) for features in self._variants]
        most = most_rows(self._slots)
        sizes = [most, *(1 << power for power in reversed(range((most - 1).bit_length())))]
        return [(rows, features) for rows in sizes for features in self._variants]

    def _run_rows(self, rows: int, features: Feature) -> None:
        """A decode step, with prefill if there are not so many slots."""
        decodes = min(rows, aligned(self._slots))
        self.run(rows - decodes, decodes, ALIGNED if rows > decodes else 0, features)

    @property
    def _shapes(self) -> list[tuple[int, int, int]]:
        """Rows with prefill, decode rows, and prompt tokens of all steps with prefill that are launched."""
        largest = aligned(self._max_step_tokens)
        sizes = sorted({aligned(1 << power) for power in range(self._max_step_tokens.bit_length())} | {largest})
        rows = sorted({launched_rows(count) for count in range(1, self._slots + 1)})
        shapes = [(count, 0, largest) for count in rows]
        return shapes + [(rows[0], decodes, size) for decodes in (0, ALIGNED, aligned(self._slots)) for size in sizes]

    def compile(self, progress: Progress) -> None:
        """Runs every shape that a step with prefill is launched in, and every way to sample."""
        shapes, sampled = self._shapes, self._sampled
        count = len(shapes) + len(sampled)
        for number, shape in enumerate(shapes):
            progress("warming up", number / count)
            for features in self._variants[-1:] if number else self._variants:
                self.run(*shape, features)
        for number, (rows, features) in enumerate(sampled, len(shapes)):
            progress("warming up", number / count)
            self._run_rows(rows, features)

    def tokens_worth_capturing(self) -> int:
        """Prompt tokens up to which a step's launches hold it up, found by trying; larger steps keep the device busy as they are.

        Every rank tries the same steps, whatever it finds: they add up together.
        """
        most, tokens = None, SMALL[-1]
        while tokens < self._max_step_tokens:
            launch_s, step_s = min(self._try(tokens) for _ in range(TRIES))
            if most is None and step_s > BUSY * launch_s:
                most = tokens
            tokens *= 2
        return most or self._max_step_tokens

    def _try(self, tokens: int) -> tuple[float, float]:
        """Seconds that a step's launches take, and that it takes as a whole."""
        torch.cuda.synchronize()
        begin_s = time.monotonic()
        self.run(ALIGNED, 0, tokens, NO_FEATURES)
        launched_s = time.monotonic()
        torch.cuda.synchronize()
        return launched_s - begin_s, time.monotonic() - begin_s

    def step_bytes(self) -> int:
        """Device memory that the largest steps take while they run."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(min(MOST_ROWS, launched_rows(self._slots)), self._slots, aligned(self._max_step_tokens), self._variants[-1])
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
