"""What a step leaves in the slots once its tokens are sampled. B rows, S slots, E ids that end every row, M those of one slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options

NO_TOKEN = tl.constexpr(-1)  # the id of a row that yields none
ROWS = 16  # of a program


def advance(
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    max_length: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    eos_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    samples: Tensor,
) -> Tensor:
    """By slot, in place: length and last_token `[S]` int32, done `[S]` bool; read: max_length `[S]` int32, ignore_eos `[S]` bool,
    stop_ids `[S, M]` int32 (negative where unused); eos_ids `[E]` int32.

    By row: slots `[B]` int32 or int64, of which only done ones may come twice; lengths `[B]` int32, tokens now in the cache;
    tokens `[B]` int32, sampled, negative for a failed row; samples `[B]` bool: the row yields its token.
    Returns ids `[B]` int32: the token, -1 where the row was done or yields none, the negative token where it failed.
    """
    implementation = advance_triton if length.is_cuda else advance_torch
    return implementation(length, last_token, done, max_length, ignore_eos, stop_ids, eos_ids, slots, lengths, tokens, samples)


def advance_torch(
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    max_length: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    eos_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    samples: Tensor,
) -> Tensor:
    slots = slots.long()
    alive = ~done[slots]
    failed = alive & (tokens < 0)
    took = alive & samples & ~failed
    ends = (tokens[:, None] == eos_ids).any(dim=1) & ~ignore_eos[slots]
    ends |= (tokens[:, None] == stop_ids[slots]).any(dim=1)
    ends |= lengths + 1 >= max_length[slots]
    length[slots] = lengths.where(alive, length[slots])
    last_token[slots] = tokens.where(took, last_token[slots])
    done[slots] |= failed | (took & ends)
    return tokens.where(took | failed, NO_TOKEN.value)


def advance_triton(
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    max_length: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    eos_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    samples: Tensor,
) -> Tensor:
    rows, ids = len(slots), torch.empty_like(tokens)
    if rows:
        _advance_kernel[(cdiv(rows, ROWS),)](
            length, last_token, done, max_length, ignore_eos, stop_ids, eos_ids, slots, lengths, tokens, samples, ids,
            rows, len(eos_ids), stop_ids.shape[1],
            ROWS, next_power_of_2(max(len(eos_ids), 1)), next_power_of_2(stop_ids.shape[1]),
            num_warps=1, **pdl_options(length.device),
        )  # fmt: skip
    return ids


@triton.jit
def _advance_kernel(
    length_ptr, last_token_ptr, done_ptr, max_length_ptr, ignore_eos_ptr, stop_ids_ptr, eos_ids_ptr,
    slots_ptr, lengths_ptr, tokens_ptr, samples_ptr, ids_ptr, rows, num_eos, num_stop,
    ROWS: tl.constexpr, EOS_BLOCK: tl.constexpr, STOP_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0).to(tl.int64)
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    token = tl.load(tokens_ptr + row, mask=inside, other=0)
    samples = tl.load(samples_ptr + row, mask=inside, other=0) != 0
    alive = inside & (tl.load(done_ptr + slot, mask=inside, other=1) == 0)
    failed = alive & (token < 0)
    took = alive & samples & (token >= 0)

    eos, stop = tl.arange(0, EOS_BLOCK), tl.arange(0, STOP_BLOCK)[None, :]
    eos_ids = tl.load(eos_ids_ptr + eos, mask=eos < num_eos, other=-1)
    is_eos = tl.max((token[:, None] == eos_ids[None, :]).to(tl.int32), axis=1) > 0
    stop_ids = tl.load(stop_ids_ptr + slot[:, None] * num_stop + stop, mask=inside[:, None] & (stop < num_stop), other=-1)
    is_stop = tl.max((token[:, None] == stop_ids).to(tl.int32), axis=1) > 0
    ends = is_eos & (tl.load(ignore_eos_ptr + slot, mask=inside, other=0) == 0)
    ends |= is_stop | (length + 1 >= tl.load(max_length_ptr + slot, mask=inside, other=0))

    tl.store(length_ptr + slot, length, mask=alive)
    tl.store(last_token_ptr + slot, token, mask=took)
    tl.store(done_ptr + slot, inside, mask=failed | (took & ends))
    tl.store(ids_ptr + row, tl.where(took | failed, token, NO_TOKEN), mask=inside)
