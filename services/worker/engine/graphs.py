"""Decode steps as CUDA graphs: one for each size of batch and each variant of what its rows ask for.

A captured step reads the slots' numbers at a fixed address, and everything else from the slots' state: to replay it is all that
an iteration costs the host. Batches are filled up to a captured size with rows of the slot that nobody has.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.engine.features import Feature, variant
from services.worker.engine.interface import Progress
from services.worker.engine.staging import PlanStaging


def buckets(slots: int) -> list[int]:
    """Sizes of batches that are captured: close where a row more costs much, the last one for all slots."""
    steps = (*(1, 2, 4), *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, slots, 64))
    return [size for size in steps if size < slots] + [slots]


class DecodeGraphs:
    def __init__(
        self,
        slots: int,
        decode: Callable[[Tensor, Feature], Tensor],
        variants: tuple[Feature, ...],
        staging: PlanStaging,
        progress: Progress,
    ) -> None:
        """decode: slots `[B]` int32 on the device -> ids `[B]`. All slots must be nobody's: the steps are also run."""
        self._sizes = buckets(slots)
        self._graphs: dict[tuple[int, Feature], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        staging.decode_slots.fill_(slots)
        # The largest first: what it has allocated holds all the others, since only one graph runs at a time.
        wanted = [(size, features) for size in reversed(self._sizes) for features in reversed(variants)]
        gc.collect()
        gc.disable()  # a tensor that is freed in the middle of a capture could break it
        try:
            for number, (size, features) in enumerate(wanted):
                progress("capturing decode steps", number / len(wanted))
                rows = staging.decode_slots[:size]
                decode(rows, features)  # compiles, and lets libraries allocate, which a capture cannot
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        ids = decode(rows, features)
                    finally:
                        graph.capture_end()
                self._graphs[size, features] = graph, ids
        finally:
            gc.enable()

    def replay(self, rows: int, features: Feature) -> Tensor:
        """The step of the plan that the staging holds -> ids `[rows]` int32, until the next replay."""
        size = next(size for size in self._sizes if size >= rows)
        graph, ids = self._graphs[size, variant(features)]
        graph.replay()
        return ids[:rows]
