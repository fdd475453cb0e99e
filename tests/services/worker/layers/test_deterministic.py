"""Deterministic mode: the bits of a row's logits, whatever it is computed with and however it is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.layers.gemm import ROWS, tiled_linear
from tests.services.worker.models.group import Group, Job, Local, Outcome
from tests.services.worker.models.reference import check

Checkpoint = Callable[[str], Path]
Groups = Callable[[int], Group | Local]
PROMPT = tuple(np.random.default_rng(0).integers(3, 257, 150).tolist())
OTHERS = tuple(tuple(np.random.default_rng(length).integers(3, 257, length).tolist()) for length in (1, 40, 149, 33, 7))


def run(group: Group | Local, folder: Path, prompts: tuple[tuple[int, ...], ...], **job: Any) -> Outcome:
    outcome, *_ = group.run(Job(folder, prompts, 6, spec={"deterministic": True, "dtype": "float32"}, **job))
    return outcome


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3-moe", "ministral3"])
def test_bits_do_not_depend_on_batch_chunk_or_page_size(checkpoint: Checkpoint, group: Groups, name: str) -> None:
    folder = checkpoint(name)
    alone = run(group(1), folder, (PROMPT,))
    check(folder, (PROMPT,), alone)
    cuts = [
        run(group(1), folder, (PROMPT,), **cut)
        for cut in ({"chunk": 1}, {"chunk": 16}, {"chunk": 47}, {"page_size": 1}, {"page_size": 4}, {"page_size": 1, "chunk": 16})
    ]
    batches = [run(group(1), folder, (PROMPT, *OTHERS[:count])) for count in (1, 3, 5)]
    batches.append(run(group(1), folder, (PROMPT, *OTHERS), chunk=16))
    for other in cuts + batches:
        np.testing.assert_array_equal(other.logits[0], alone.logits[0])


def test_bits_do_not_depend_on_batch_or_chunk_where_ranks_add_up(checkpoint: Checkpoint, group: Groups) -> None:
    folder = checkpoint("llama")
    alone = run(group(4), folder, (PROMPT,))
    check(folder, (PROMPT,), alone)
    for other in (run(group(4), folder, (PROMPT, *OTHERS)), run(group(4), folder, (PROMPT,), chunk=47)):
        np.testing.assert_array_equal(other.logits[0], alone.logits[0])


@pytest.mark.parametrize("inputs, outputs", [(64, 257), (96, 64), (576, 1536), (1536, 576), (100, 24)])
def test_a_row_of_a_tiled_product_is_the_same_at_every_place(inputs: int, outputs: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(inputs)
        x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((3 * ROWS, inputs), (outputs, inputs), (outputs,)))
        together = tiled_linear(x, weight, bias)
        torch.testing.assert_close(together, (x.double() @ weight.double().T + bias).float(), rtol=1e-4, atol=1e-3)
        for rows in (slice(0, 1), slice(5, 6), slice(17, 60), slice(95, 96)):
            assert torch.equal(tiled_linear(x[rows], weight, bias), together[rows])
    finally:
        torch.set_num_threads(threads)
