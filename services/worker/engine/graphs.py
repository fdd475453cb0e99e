"""Steps as CUDA graphs: to replay one is all that an iteration costs the host.

Decode steps: one for each size of batch and each variant of what its rows ask for. A captured step reads the slots' numbers at a
fixed address and everything else from the slots' state. Steps with a little prefill, which would take longer to launch than to
compute: one for each number of prompt tokens and of decode rows beside them. Batches are filled up to a captured size with rows of
the slot that nobody has: such a row writes to the scratch page and yields no token.

S slots, B rows.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.engine.features import VARIANTS, Feature, variant
from services.worker.engine.interface import Progress
from services.worker.engine.sections import Sections, decode_sections
from services.worker.engine.staging import PREFILL_ROWS, PREFILL_SIZES, PlanStaging, prefill_shape
from shared.protocol.plan import Plan

COMMON = VARIANTS[:2]  # captured for every size of batch; the others, for fewer
MIXED = VARIANTS[2]  # what steps with prefill can do


def decode_sizes(slots: int) -> list[int]:
    """Sizes of batches that are captured: close where a row more costs much, the last one for all slots."""
    steps = (*(1, 2, 4), *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, slots, 64))
    return [size for size in steps if size < slots] + [slots]


def mixed_sizes(slots: int) -> list[int]:
    """Numbers of decode rows beside captured prefill."""
    return [0, *(size for size in (4, 16, 64) if size < slots), slots]


class Graphs:
    def __init__(
        self,
        slots: int,
        max_length: int,
        max_step_tokens: int,
        step: Callable[[Sections, int, Feature], Tensor],
        staging: PlanStaging,
        progress: Progress,
    ) -> None:
        """step: the sections of a step, the longest prefill chunk, and its features -> its result `[B, ...]`.

        All slots must be nobody's: the steps are also run.
        """
        self._step, self._pool, self._stream = step, torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._decode_sizes, self._mixed_sizes = decode_sizes(slots), mixed_sizes(slots)
        self._decode: dict[tuple[int, Feature], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._mixed: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._read: list[Sections] = []  # what captured steps read must outlive them
        self._max_length = max_length
        # The largest first: what it has allocated holds all the others, since only one graph runs at a time.
        decodes = [
            (size, features)
            for number, size in enumerate(reversed(self._decode_sizes))
            for features in reversed(VARIANTS)
            if features in COMMON or number % 4 == 0 or size == 1
        ]
        mixed = [
            (tokens, rows)
            for tokens in reversed(PREFILL_SIZES)
            for rows in reversed(self._mixed_sizes)
            if tokens + rows <= max_step_tokens and tokens <= max_length
        ]
        gc.collect()
        gc.disable()  # a tensor that is freed in the middle of a capture could break it
        try:
            for number, (tokens, rows) in enumerate(mixed):
                progress("capturing steps", number / len(mixed + decodes))
                staging.load_nobody(tokens)
                self._mixed[tokens, rows] = self._capture(staging.sections(rows, PREFILL_ROWS, tokens), tokens, MIXED)
            staging.load_nobody(0)
            for number, (size, features) in enumerate(decodes, len(mixed)):
                progress("capturing steps", number / len(mixed + decodes))
                self._decode[size, features] = self._capture(decode_sections(staging.decode_slots[:size]), 0, features)
        finally:
            gc.enable()

    def replay(self, plan: Plan, features: Feature) -> Tensor | None:
        """The step of the plan that the staging holds -> its result `[B, ...]`, until the next replay; None if no graph can do it."""
        wanted, decodes, prefills = variant(features), len(plan.decode_slots), len(plan.prefill_slots)
        if not prefills:
            graph, result = next(
                self._decode[size, wanted] for size in self._decode_sizes if size >= decodes and (size, wanted) in self._decode
            )
            graph.replay()
            return result[:decodes]
        prefill_rows, tokens = prefill_shape(prefills, len(plan.prefill_ids), self._max_length)
        rows = next(size for size in self._mixed_sizes if size >= decodes)
        if prefill_rows != PREFILL_ROWS or features not in MIXED or (tokens, rows) not in self._mixed:
            return None
        graph, result = self._mixed[tokens, rows]
        graph.replay()
        return torch.cat((result[:decodes], result[rows : rows + prefills])) if decodes else result[:prefills]

    def _capture(self, sections: Sections, max_query: int, features: Feature) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._read.append(sections)
        self._step(sections, max_query, features)  # compiles, and lets libraries allocate, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = self._step(sections, max_query, features)
            finally:
                graph.capture_end()
        return graph, result
