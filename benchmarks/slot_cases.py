"""The kernels around a step's layers, as cases of `python -m benchmarks kernels`: from a plan to tokens, and from logits to ids.

S slots, B rows, V ids of the vocabulary. What they read of the slots is in the L2 cache, as in a step.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.launches import Case, Launch
from kernels.advance import advance
from kernels.early_end import forbid_early_end
from kernels.logprobs import logprobs
from kernels.penalties import count, penalise
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
    """Logits are read and written in place, counts read; then the step's ids are counted."""
    counts, half = torch.zeros(SLOTS, VOCABULARY, dtype=torch.int32, device="cuda"), torch.full((SLOTS,), 0.5, device="cuda")
    bias_ids = torch.arange(BIASES, dtype=torch.int32, device="cuda").repeat(SLOTS, 1)
    bias_values, in_prompt = torch.zeros(SLOTS, BIASES, device="cuda"), torch.zeros(SLOTS, dtype=torch.bool, device="cuda")
    for rows in (1, 32, 256):
        logits, slots = torch.randn(rows, VOCABULARY, device="cuda"), _rows(rows)
        penalised = partial(penalise, logits, slots, counts, half, half, half + 0.6, bias_ids, bias_values)
        yield Case(f"B={rows} V={VOCABULARY}, {BIASES} biases", 12.0 * logits.numel(), "TB/s", [penalised])
        ids = torch.randint(0, VOCABULARY, (rows,), dtype=torch.int32, device="cuda")
        yield Case(f"B={rows}, count", 8.0 * rows, "TB/s", [partial(count, counts, slots, ids, in_prompt[:rows])])


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
