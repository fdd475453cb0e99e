"""From the rows of a plan and the slots' state to the tokens of a step.

D decode rows, P prefill rows, T_p prefill tokens, T = D + T_p tokens, S slots, N tokens a page.
"""

import torch
from torch import Tensor


def plan_unpack(
    page_table: Tensor,
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    decode_slots: Tensor,
    prefill_slots: Tensor,
    prefill_starts: Tensor,
    prefill_lengths: Tensor,
    prefill_ids: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """page_table `[S, pages]` int32, length and last_token `[S]` int32, done `[S]` bool; the plan's sections, int32.

    Returns ids and positions `[T]` int32, locations `[T]` int64 (page * N + offset), KV lengths `[D + P]` int32 with this
    step's tokens, and query_starts `[P + 1]` int32. A done decode row has KV length 0 and writes to location 0, in the
    scratch page.
    """
    return plan_unpack_torch(
        page_table, length, last_token, done, decode_slots, prefill_slots, prefill_starts, prefill_lengths, prefill_ids, page_size
    )


def plan_unpack_torch(
    page_table: Tensor,
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    decode_slots: Tensor,
    prefill_slots: Tensor,
    prefill_starts: Tensor,
    prefill_lengths: Tensor,
    prefill_ids: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = decode_slots.long()
    active = ~done[slots]
    decode_positions = length[slots]
    decode_locations = _locate(page_table, slots, decode_positions, page_size).where(active, 0)

    query_starts = torch.zeros(len(prefill_slots) + 1, dtype=torch.int32, device=prefill_slots.device)
    query_starts[1:] = prefill_lengths.cumsum(0)
    row = torch.repeat_interleave(prefill_lengths, output_size=len(prefill_ids))
    offset = torch.arange(len(prefill_ids), dtype=torch.int32, device=row.device) - query_starts[row]
    prefill_positions = prefill_starts[row] + offset
    prefill_locations = _locate(page_table, prefill_slots.long()[row], prefill_positions, page_size)

    return (
        torch.cat((last_token[slots], prefill_ids)),
        torch.cat((decode_positions, prefill_positions)),
        torch.cat((decode_locations, prefill_locations)),
        torch.cat(((decode_positions + 1).where(active, 0), prefill_starts + prefill_lengths)),
        query_starts,
    )


def _locate(page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int) -> Tensor:
    page = page_table[slots, (positions // page_size).long()].long()  # int64 before the product: a pool may hold 2**31 tokens
    return page * page_size + positions % page_size
