"""The kernels around a step's layers, as cases of `python -m benchmarks kernels`: from a plan to tokens, and from logits to ids.

S slots, B rows, V ids of the vocabulary. What they read of the slots is in the L2 cache, as in a step.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.launches import Case, Launch
from kernels.advance import advance
from kernels.counts import Held, count, recount
from kernels.early_end import forbid_early_end
from kernels.logprobs import logprobs
from kernels.penalties import penalise
from kernels.plan_unpack import plan_unpack
from kernels.sampling import greedy, sample

VOCABULARY = 151_936
SLOTS = 256
PAGE_SIZE = 16
LENGTH = 1024
STOP_IDS, BIASES = 16, 300  # of a slot
TOP = 20  # log-probabilities at a place


def sampling_cases() -> Iterator[Case]:
    for rows in (1, 32, 256):
        logits = 3 * torch.randn(rows, VOCABULARY, device="cuda")
        seeds, positions = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda", dtype=torch.int32)
        work = 4.0 * rows * VOCABULARY
        yield Case(f"B={rows} V={VOCABULARY} greedy", work, "TB/s", [partial(greedy, logits)], [partial(torch.argmax, logits, 1)])
        for temperature, top_k, top_p in ((0.6, 0, 1.0), (0.6, 20, 0.95), (0.6, 0, 0.9), (1.0, 500, 1.0)):
            settings = (
                torch.full((rows,), temperature, device="cuda"),
                torch.full((rows,), top_k, device="cuda", dtype=torch.int32),
                torch.full((rows,), top_p, device="cuda"),
                torch.zeros(rows, device="cuda"),
            )
            ours = partial(sample, logits, *settings, seeds, positions)
            yield Case(f"B={rows} temperature {temperature} top_k {top_k} top_p {top_p}", work, "TB/s", [ours])


def logprob_cases() -> Iterator[Case]:
    """Beside torch's log-softmax and top-k."""
    for rows in (1, 32, 256):
        logits, chosen = 3 * torch.randn(rows, VOCABULARY, device="cuda"), _int32s(rows)
        ours, eager = partial(logprobs, logits, chosen, TOP), partial(_eager_logprobs, logits)
        yield Case(f"B={rows} V={VOCABULARY} top {TOP}", 4.0 * logits.numel(), "TB/s", [ours], [eager])


def _eager_logprobs(logits: Tensor) -> object:
    return logits.log_softmax(dim=1).topk(TOP)


def penalty_cases() -> Iterator[Case]:
    """Of sequences of LENGTH different ids: their logits are read and written in place, lists and counts read, without biases and with;
    then the step's ids are counted; and what the pages hold."""
    pages, yes = LENGTH // PAGE_SIZE, torch.ones(SLOTS, dtype=torch.bool, device="cuda")
    token_ids = torch.stack([torch.randperm(VOCABULARY, device="cuda")[:LENGTH] for _ in range(SLOTS)]).int().flatten()
    page_table = torch.arange(SLOTS * pages, dtype=torch.int32, device="cuda").view(SLOTS, pages)
    held = Held.nothing(SLOTS, VOCABULARY, 2 * LENGTH, page_table.device)
    lengths, half = _int32s(SLOTS) + LENGTH, torch.full((SLOTS,), 0.5, device="cuda")
    bias_ids = torch.arange(BIASES, dtype=torch.int32, device="cuda").repeat(SLOTS, 1)
    bias_values = torch.zeros(SLOTS, BIASES, device="cuda")
    for rows in (1, 32, 256):
        logits, slots, ids = torch.randn(rows, VOCABULARY, device="cuda"), _rows(rows), token_ids[:rows].contiguous()
        prefills = (slots, lengths[:rows], yes[:rows], lengths // 2, token_ids, page_table)
        recounted = partial(recount, held, yes, *prefills, PAGE_SIZE)
        yield Case(f"B={rows}, recount of {LENGTH}", 24.0 * rows * LENGTH, "TB/s", [recounted])
        for biases, ids_of_biases in ((0, torch.full_like(bias_ids, -1)), (BIASES, bias_ids)):
            penalised = partial(penalise, logits, slots, held, half, half, half + 0.6, ids_of_biases, bias_values)
            work = rows * (16.0 * LENGTH + 4.0 * BIASES + 12.0 * biases)
            yield Case(f"B={rows} V={VOCABULARY}, {LENGTH} held, {biases} biases", work, "TB/s", [penalised])
        yield Case(f"B={rows}, count", 12.0 * rows, "TB/s", [partial(count, held, yes, slots, ids)])


def state_cases() -> Iterator[Case]:
    """`plan_unpack` of a decode step and of one with prefill, `advance`, and the ids that would end a row too early."""
    table = torch.randint(0, 10_000, (SLOTS, 2 * LENGTH // PAGE_SIZE), dtype=torch.int32, device="cuda")
    length, last, done = _int32s(SLOTS) + LENGTH, _int32s(SLOTS), torch.zeros(SLOTS, dtype=torch.bool, device="cuda")
    stop_ids, eos_ids = _int32s(SLOTS, STOP_IDS) - 1, _int32s(1) + 2
    state = (table, length, last, done)
    for rows, prompts in ((1, 0), (256, 0), (0, 16)):
        tokens = prompts * LENGTH
        prefill = (_rows(prompts), _int32s(prompts), _int32s(prompts) + LENGTH, _int32s(tokens))
        unpack: Launch = partial(plan_unpack, *state, _rows(rows), *prefill, PAGE_SIZE)
        work = 37.0 * rows + 20 * tokens  # of a token its id, position and 64-bit location; of a row its slot's state and its length
        yield Case(f"plan_unpack, {rows} decode rows, {prompts} x {LENGTH} prompt tokens", work, "TB/s", [unpack])
    for rows in (1, 256):
        slots, tokens_of_rows, yes = _rows(rows), _int32s(rows) + 5, torch.ones(rows, dtype=torch.bool, device="cuda")
        lengths, logits = _int32s(rows) + LENGTH, torch.randn(rows, VOCABULARY, device="cuda")
        ends = (done, stop_ids, eos_ids, slots, lengths)
        advanced = partial(advance, length.clone(), last.clone(), done.clone(), length + LENGTH, *ends, tokens_of_rows, yes)
        yield Case(f"advance, B={rows}", rows * (4.0 * STOP_IDS + 40), "TB/s", [advanced])
        early = partial(forbid_early_end, logits, length + 1, *ends)
        yield Case(f"forbid_early_end, B={rows}", rows * (4.0 * STOP_IDS + 16), "TB/s", [early])


def _int32s(*shape: int) -> Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def _rows(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device="cuda")
