"""Mixture of experts: routing, and the experts' MLPs as grouped matrix products over the tokens that chose them.

T tokens, D hidden size, E experts, C experts a token chooses, I intermediate size of an expert on this rank, A = T * C
assignments: number t * C + c is the c-th expert of token t.

Five launches, none of which the host waits for: route, sort the assignments by expert, gate and up with the activation, down,
weighted sum. The grids of the products are bounds that shapes give; each program finds its expert from the counts on the
device, and surplus programs end at once. Nothing is added up in an order that could vary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import HOPPER, capability, cdiv, next_power_of_2, pdl_options


def route(logits: Tensor, choices: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router logits `[T, E]` -> weights `[T, C]` float32, experts `[T, C]` int32, best first, the lower id of equals first.

    Softmax in float32 over all experts, then the best C; renormalise: their weights are scaled to sum to 1.
    """
    return route_triton(logits, choices, renormalise) if logits.is_cuda else route_torch(logits, choices, renormalise)


def moe(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """x `[T, D]`, gate_up `[E, 2 * I, D]` (gate first), down `[E, D, I]`, weights and experts as `route` gives them -> `[T, D]`.

    The weighted sum of `silu_and_mul(x @ gate_up.T) @ down.T` of each token's experts, summed in float32.
    Raises ValueError if x or a weight is not contiguous.
    """
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got {tuple(tensor.shape)} with strides {tensor.stride()}")
    return moe_triton(x, gate_up, down, weights, experts) if x.is_cuda else moe_torch(x, gate_up, down, weights, experts)


def route_torch(logits: Tensor, choices: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    ordered, order = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, :choices], order[:, :choices]
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), experts.int().contiguous()


def moe_torch(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        out.index_add_(0, tokens, (F.silu(gate) * up) @ down[expert].float().T * weights[tokens, choice, None])
    return out.to(x.dtype)


class Config(NamedTuple):
    row_block: int  # assignments of a tile
    column_block: int  # output columns of a tile; gate and up each
    inner_block: int
    warps: int
    stages: int


def config(assignments: int, experts: int, element_bytes: int, hopper: bool) -> tuple[Config, Config]:
    """For gate and up, and for down, by the mean number of assignments of an expert."""
    if element_bytes == 4:
        return Config(16, 32, 32, 4, 1), Config(16, 32, 32, 4, 1)
    mean = assignments / experts
    # H200, bfloat16, Qwen3-30B-A3B (E 128, D 2048, I 768, C 8), us of all five launches, floor by weights read in brackets:
    if mean <= 8:  # 8 tokens 122 [106], 32 tokens 247 [231], 128 tokens 299 [266]
        return Config(16, 32, 256, 4, 3), Config(16, 64, 128, 4, 4)
    if mean <= 32:  # 256 tokens 307 [266]; 16 rows 327
        return Config(32, 64, 128, 4, 3), Config(32, 64, 128, 4, 3)
    if mean <= 128 or not hopper:  # 1,024 tokens 391
        return Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3)
    return Config(128, 128, 64, 8, 3), Config(128, 256, 64, 8, 3)  # 8,192 tokens 1,473, 420 TFLOP/s; down as gate and up 1,555


FIXED = {
    2: (Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3)),
    4: (Config(16, 32, 32, 4, 1), Config(16, 32, 32, 4, 1)),
}  # by element bytes


def fixed_moe(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """`moe` on a GPU with one shape of tiles for any number of tokens: a token's result does not depend on the others, bit by bit."""
    return moe_triton(x, gate_up, down, weights, experts, FIXED[x.element_size()])


def route_triton(logits: Tensor, choices: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, choices, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, choices, dtype=torch.int32, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits, weights, experts, logits.stride(0), num_experts, choices, renormalise,
            next_power_of_2(num_experts), next_power_of_2(choices), num_warps=1, **pdl_options(logits.device),
        )  # fmt: skip
    return weights, experts


def moe_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, tuned: tuple[Config, Config] | None = None
) -> Tensor:
    (tokens, hidden), (num_experts, _, inner), choices = x.shape, down.shape, experts.shape[1]
    assignments = tokens * choices
    y = torch.empty_like(x)
    if tokens == 0:
        return y
    first, second = tuned or config(assignments, num_experts, x.element_size(), capability(x.device) >= HOPPER)
    order = torch.empty(assignments, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    pdl = pdl_options(x.device)
    block = min(next_power_of_2(assignments), 4096)
    _sort_kernel[(num_experts,)](experts, order, counts, assignments, block, num_warps=4, **pdl)
    activated = x.new_empty(assignments, inner)
    results = x.new_empty(assignments, hidden)
    for kernel_config, source, weight, destination, columns, size, gated in (
        (first, x, gate_up, activated, inner, hidden, True),
        (second, activated, down, results, hidden, inner, False),
    ):
        rows, column_block, inner_block, warps, stages = kernel_config
        tiles = min(assignments, assignments // rows + num_experts)
        _product_kernel[(tiles, cdiv(columns, column_block))](
            source, weight, destination, order, counts, num_experts, columns, size, choices, gated,
            next_power_of_2(num_experts), rows, column_block, inner_block, stages, num_warps=warps, **pdl,
        )  # fmt: skip
    column_block = min(next_power_of_2(hidden), 1024)
    _sum_kernel[(tokens, cdiv(hidden, column_block))](results, weights, y, hidden, choices, column_block, num_warps=4, **pdl)
    return y


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, row_stride, num_experts, choices, RENORMALISE: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr, CHOICES_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, choice = tl.arange(0, EXPERTS_BLOCK), tl.arange(0, CHOICES_BLOCK)
    logits = tl.load(logits_ptr + token * row_stride + expert, mask=expert < num_experts, other=float("-inf")).to(tl.float32)
    masses = tl.exp(logits - tl.max(logits, axis=0))
    probability = tl.where(expert < num_experts, masses / tl.sum(masses, axis=0), -1.0)
    weights = tl.zeros([CHOICES_BLOCK], tl.float32)
    experts = tl.zeros([CHOICES_BLOCK], tl.int32)
    for index in range(choices):
        best, best_expert = tl.max(probability, axis=0, return_indices=True)
        weights = tl.where(choice == index, best, weights)
        experts = tl.where(choice == index, best_expert, experts)
        probability = tl.where(expert == best_expert, -1.0, probability)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * choices + choice, weights, mask=choice < choices)
    tl.store(experts_ptr + token * choices + choice, experts, mask=choice < choices)


@triton.jit
def _sort_kernel(experts_ptr, order_ptr, counts_ptr, assignments, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each program writes the assignments of one expert, ascending, behind those of the experts before it."""
    expert = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    before = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, assignments, BLOCK, num_stages=2):
        index = start + tl.arange(0, BLOCK)
        before += (tl.load(experts_ptr + index, mask=index < assignments, other=2**30) < expert).to(tl.int32)
    offset = tl.sum(before, axis=0)
    count = tl.full([], 0, tl.int32)
    for start in tl.range(0, assignments, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mine = (tl.load(experts_ptr + index, mask=index < assignments, other=2**30) == expert).to(tl.int32)
        tl.store(order_ptr + offset + count + tl.cumsum(mine, axis=0) - 1, index, mask=mine > 0)
        count += tl.sum(mine, axis=0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def _product_kernel(
    x_ptr, weight_ptr, y_ptr, order_ptr, counts_ptr, num_experts, columns, size, choices, GATED: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """GATED: x `[T, D]` by token -> `silu(gate) * up`, `[A, I]` in sorted order; else x in sorted order -> `[A, D]` by assignment."""
    tile, column_tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.arange(0, EXPERTS_BLOCK)
    counts = tl.load(counts_ptr + index, mask=index < num_experts, other=0)
    expert_tiles = (counts + ROWS - 1) // ROWS
    last_tile = tl.cumsum(expert_tiles, axis=0)
    is_expert = (last_tile > tile) & (last_tile - expert_tiles <= tile)
    count = tl.sum(tl.where(is_expert, counts, 0), axis=0)
    if count > 0:
        expert = tl.sum(tl.where(is_expert, index, 0), axis=0).to(tl.int64)
        begin = tl.sum(tl.where(is_expert, tl.cumsum(counts, axis=0) - counts, 0), axis=0)
        row = (tile - tl.sum(tl.where(is_expert, last_tile - expert_tiles, 0), axis=0)) * ROWS + tl.arange(0, ROWS)
        in_rows = row < count
        place = begin + row
        assignment = tl.load(order_ptr + place, mask=in_rows, other=0)
        source = (assignment // choices if GATED else place).to(tl.int64)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = column < columns
        matrix_ptr = weight_ptr + expert * (columns * (2 if GATED else 1)) * size
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, size, INNER, num_stages=STAGES):
            inner = start + tl.arange(0, INNER)
            in_size = inner < size
            x = tl.load(x_ptr + source[:, None] * size + inner[None, :], mask=in_rows[:, None] & in_size[None, :], other=0.0)
            weight_place = matrix_ptr + column.to(tl.int64)[:, None] * size + inner[None, :]
            in_weight = in_columns[:, None] & in_size[None, :]
            weight = tl.load(weight_place, mask=in_weight, other=0.0)
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
            if GATED:
                weight_up = tl.load(weight_place + columns.to(tl.int64) * size, mask=in_weight, other=0.0)
                total_up = tl.dot(x, tl.trans(weight_up), total_up, input_precision="ieee")
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        destination = (place if GATED else assignment).to(tl.int64)
        tl.store(y_ptr + destination[:, None] * columns + column[None, :], total, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _sum_kernel(results_ptr, weights_ptr, y_ptr, hidden, choices, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(choices):
        assignment = token * choices + choice
        result = tl.load(results_ptr + assignment * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + assignment) * result
    tl.store(y_ptr + token * hidden + column, total, mask=inside)
