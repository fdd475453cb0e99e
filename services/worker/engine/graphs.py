"""Steps as CUDA graphs: to replay one is all that an iteration costs the host.

Decode steps: one for each size of batch and each variant of what its rows ask for. A captured step reads the slots' numbers at a
fixed address and everything else from the slots' state. Steps with prefill: one for each number of prompt tokens, with the most rows that
these are expected in, and of decode rows beside them; `sizes` says which. Batches are filled up to a captured size with rows of the slot
that nobody has: such a row writes to the scratch page, attends to nothing and yields no token.

S slots, B rows.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.engine.features import VARIANTS, Feature
from services.worker.engine.interface import Progress
from services.worker.engine.sections import Sections, decode_sections
from services.worker.engine.sizes import Prefill, PrefillSizes, decode_sizes, sizes_beside
from services.worker.engine.staging import PlanStaging
from shared.protocol.plan import Plan

logger = logging.getLogger(__name__)

MIXED = VARIANTS[2]  # what steps with prefill can do


class Graphs:
    def __init__(
        self,
        slots: int,
        sizes: PrefillSizes,
        step: Callable[[Sections, int, Feature], Tensor],
        variants: Sequence[Feature],
        staging: PlanStaging,
        progress: Progress,
    ) -> None:
        """sizes: of captured prefill. step: the sections of a step, the longest prefill chunk, and its features -> its result `[B, ...]`.
        variants: of decode steps.

        What steps launch should be compiled, for the most part. All slots must be nobody's: the largest steps are also run.
        """
        self.sizes, self._step, self._variants, self._staging = sizes, step, variants, staging
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._decode_sizes = decode_sizes(slots)
        self._beside = {size: sizes_beside(size.tokens, slots) for size in sizes.captured}
        self._decode: dict[tuple[int, Feature], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._mixed: dict[tuple[Prefill, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._read: list[Sections] = []  # what captured steps read must outlive them
        # The largest first: what it has allocated holds all the others, since only one graph runs at a time.
        decodes = [
            (size, features)
            for number, size in enumerate(reversed(self._decode_sizes))
            for features in reversed(variants)
            if Feature.LEAST_LENGTH not in features or number % 4 == 0 or size == 1  # what few ask for, for fewer sizes
        ]
        mixed = [(size, rows) for size in reversed(sizes.captured) for rows in reversed(self._beside[size])]
        count, begin_s, free_bytes = len(mixed + decodes), time.monotonic(), torch.cuda.mem_get_info()[0]
        gc.collect()
        gc.disable()  # a tensor that is freed in the middle of a capture could break it
        try:
            for number, (size, rows) in enumerate(mixed):
                progress("capturing steps", number / count)
                staging.load_nobody(size.tokens)
                self._mixed[size, rows] = self._capture(staging.sections(rows, size), size.tokens, MIXED, run=number == 0)
            staging.load_nobody(0)
            for number, (rows, features) in enumerate(decodes, len(mixed)):
                progress("capturing steps", number / count)
                sections = decode_sections(staging.decode_slots[:rows])
                self._decode[rows, features] = self._capture(sections, 0, features, run=rows == self._decode_sizes[-1])
        finally:
            gc.enable()
        taken = free_bytes - torch.cuda.mem_get_info()[0]
        logger.info(
            "captured %d steps, %d of them with up to %d prompt tokens, in %.1f s and %d MiB",
            count, len(mixed), max((size.tokens for size in sizes.captured), default=0), time.monotonic() - begin_s, taken >> 20,
        )  # fmt: skip

    def replay(self, plan: Plan, features: Feature) -> Tensor | None:
        """The step of the plan that the staging holds -> its result `[B, ...]`, until the next replay; None if no graph can do it."""
        wanted = next(each for each in self._variants if features in each)
        decodes, prefills = len(plan.decode_slots), len(plan.prefill_slots)
        if not prefills:
            graph, result = next(
                self._decode[size, wanted] for size in self._decode_sizes if size >= decodes and (size, wanted) in self._decode
            )
            graph.replay()
            return result[:decodes]
        beside = self._beside.get(self._staging.filled)
        if beside is None or features not in MIXED:
            return None
        rows = next(size for size in beside if size >= decodes)
        graph, result = self._mixed[self._staging.filled, rows]
        graph.replay()
        return torch.cat((result[:decodes], result[rows : rows + prefills])) if decodes else result[:prefills]

    def _capture(self, sections: Sections, max_query: int, features: Feature, run: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """run: also before it is captured, so that libraries allocate, which a capture cannot; the largest step of a kind does."""
        self._read.append(sections)
        if run:
            self._step(sections, max_query, features)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="relaxed")  # what is compiled only now is loaded in the middle of it
            try:
                result = self._step(sections, max_query, features)
            finally:
                graph.capture_end()
        return graph, result
