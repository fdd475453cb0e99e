"""The experts of a token or a few, of which hardly two choose the same: two launches, straight from the router's logits.

T tokens, D hidden size, E experts, C experts a token, I intermediate size of an expert on this rank.

Every program ranks the logits of its token for itself, which takes less than a launch, and multiplies without tensor cores. The second
kernel adds up a token's experts, and asks for its weights before it waits for the first: it knows the experts by then.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options, prefetch
from kernels.routing import rank_experts

MOST_REGISTERS = 128  # of a thread, so that at least 16 warps run on a multiprocessor


class FewConfig(NamedTuple):
    gate_up_columns: int  # of a step; gate and up each
    gate_up_steps: int  # of a program
    gate_up_stages: int
    gate_up_warps: int
    down_columns: int  # of a step
    down_steps: int  # of a program; with one, its weights are in registers before the wait, with more asked for
    down_stages: int
    down_warps: int


def moe_few_triton(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool, tuned: FewConfig) -> Tensor:
    (tokens, hidden), (num_experts, _, inner) = x.shape, down.shape
    activated, y = x.new_empty(tokens * choices, inner), x.new_empty(tokens, hidden)
    experts_block, options = next_power_of_2(num_experts), {"maxnreg": MOST_REGISTERS, **pdl_options(x.device)}
    addressable = inner * x.element_size() % 16 == 0  # by the copy engine
    _few_gate_up_kernel[(cdiv(inner, tuned.gate_up_columns * tuned.gate_up_steps), tokens * choices)](
        x, gate_up, logits, activated, logits.stride(0), num_experts, inner, hidden, choices, experts_block,
        tuned.gate_up_columns, tuned.gate_up_steps, next_power_of_2(hidden), tuned.gate_up_stages, num_warps=tuned.gate_up_warps, **options,
    )  # fmt: skip
    _few_down_kernel[(cdiv(hidden, tuned.down_columns * tuned.down_steps), tokens)](
        activated, down, logits, y, logits.stride(0), num_experts, hidden, inner, choices, renormalise, addressable, experts_block,
        next_power_of_2(choices), tuned.down_columns, tuned.down_steps, next_power_of_2(inner), tuned.down_stages,
        num_warps=tuned.down_warps, **options,
    )  # fmt: skip
    return y


@triton.jit
def _few_gate_up_kernel(
    x_ptr, weight_ptr, logits_ptr, y_ptr, logits_stride, num_experts, columns, size, choices, EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x `[T, D]` -> `silu(gate) * up` of every assignment, `[A, I]`."""
    assignment = tl.program_id(1)
    token, choice = (assignment // choices).to(tl.int64), assignment % choices
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, rank = rank_experts(logits_ptr + token * logits_stride, num_experts, EXPERTS)
    expert = tl.sum(tl.where(rank == choice, tl.arange(0, EXPERTS), 0), axis=0).to(tl.int64)
    inner = tl.arange(0, INNER)[None, :]
    x = tl.load(x_ptr + token * size + inner, mask=inner < size, other=0.0).to(tl.float32)
    gate_ptr = weight_ptr + expert * 2 * columns * size + inner
    up_ptr = gate_ptr + columns.to(tl.int64) * size
    first = tl.program_id(0) * STEPS * COLUMNS
    for start in tl.range(first, first + STEPS * COLUMNS, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        in_weight = (column < columns)[:, None] & (inner < size)
        place = column[:, None] * size
        gate = tl.sum(x * tl.load(gate_ptr + place, mask=in_weight, other=0.0).to(tl.float32), axis=1)
        up = tl.sum(x * tl.load(up_ptr + place, mask=in_weight, other=0.0).to(tl.float32), axis=1)
        tl.store(y_ptr + assignment.to(tl.int64) * columns + column, gate * tl.sigmoid(gate) * up, mask=column < columns)


@triton.jit
def _few_down_kernel(
    x_ptr, weight_ptr, logits_ptr, y_ptr, logits_stride, num_experts, columns, size, choices, RENORMALISE: tl.constexpr,
    ADDRESSABLE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    INNER: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x `[A, I]` -> the sum of a token's experts, each times its probability, `[T, D]`."""
    first, token = tl.program_id(0) * STEPS * COLUMNS, tl.program_id(1).to(tl.int64)
    row_ptr = logits_ptr + token * logits_stride  # older than the kernel before this one
    logits, rank = rank_experts(row_ptr, num_experts, EXPERTS)
    choice = tl.arange(0, CHOICES)
    expert = tl.zeros([CHOICES], tl.int64)
    for four in tl.static_range(0, CHOICES, 4):  # four ids of 16 bits in one sum
        place = rank - four
        ids = tl.arange(0, EXPERTS).to(tl.int64) << (16 * (place & 3))
        packed = tl.sum(tl.where((place >= 0) & (place < 4), ids, 0), axis=0)
        expert = tl.where((choice >= four) & (choice < four + 4), packed >> (16 * (choice & 3)) & 0xFFFF, expert)
    most = tl.max(logits, axis=0)
    mass = tl.exp(tl.load(row_ptr + expert, mask=choice < choices, other=float("-inf")).to(tl.float32) - most)
    probability = mass / tl.sum(mass if RENORMALISE else tl.exp(logits - most), axis=0)

    inner, column = tl.arange(0, INNER)[None, None, :], first + tl.arange(0, COLUMNS)
    in_x = (choice < choices)[:, None, None] & (inner < size)
    matrix_ptr = weight_ptr + (expert * columns * size)[:, None, None] + inner
    if STEPS == 1:
        weight = tl.load(matrix_ptr + column[None, :, None] * size, mask=in_x & (column < columns)[None, :, None], other=0.0)
    if PDL:
        if STEPS > 1 and ADDRESSABLE:
            ROWS: tl.constexpr = triton.next_power_of_2(STEPS * COLUMNS)
            row = tl.arange(0, ROWS)[None, :]
            asked = (choice < choices)[:, None] & (row < STEPS * COLUMNS) & (first + row < columns)
            bytes = size * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            prefetch(weight_ptr + (expert[:, None] * columns + first + row) * size, tl.where(asked, bytes, 0))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + (token * choices + choice)[:, None, None] * size + inner, mask=in_x, other=0.0)
    x = x.to(tl.float32) * probability[:, None, None]
    y_row_ptr = y_ptr + token * columns
    if STEPS == 1:
        total = tl.sum(tl.sum(x * weight.to(tl.float32), axis=0), axis=1)
        tl.store(y_row_ptr + column, total, mask=column < columns)
    else:
        for start in tl.range(first, first + STEPS * COLUMNS, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            weight = tl.load(matrix_ptr + column[None, :, None] * size, mask=in_x & (column < columns)[None, :, None], other=0.0)
            total = tl.sum(tl.sum(x * weight.to(tl.float32), axis=0), axis=1)
            tl.store(y_row_ptr + column, total, mask=column < columns)
