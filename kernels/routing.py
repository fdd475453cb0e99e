"""Which experts a token takes, and which tokens an expert has. T tokens, E experts, C experts a token, A = T * C assignments: number
t * C + c is the c-th expert of token t.

The assignments of an expert stand in a row of their own with room for all tokens, so that no program has to know how many the
experts before it have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import next_power_of_2, pdl_options

RANKED_BLOCK = 128  # tokens
COLLECTED_BLOCK = 8192  # assignments


def route(logits: Tensor, choices: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router logits `[T, E]` -> weights `[T, C]` float32, experts `[T, C]` int32, best first, the lower id of equals first.

    Softmax in float32 over all experts, then the best C; renormalise: their weights are scaled to sum to 1.
    """
    return route_triton(logits, choices, renormalise) if logits.is_cuda else route_torch(logits, choices, renormalise)


def route_torch(logits: Tensor, choices: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    ordered, order = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, :choices], order[:, :choices]
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), experts.int().contiguous()


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


def assign_triton(logits: Tensor, choices: int, renormalise: bool, by_token: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Router logits `[T, E]`, T > 0 -> masses `[T, C]` float32; assignments by expert `[E, T]` int32, ascending; how many of them an
    expert has, `[E]` int32.

    A token's masses are its experts' probabilities; renormalise: up to a factor that its experts share, for whoever scales them.
    by_token: in two launches, the first a program a token, whose masses do not depend on the other tokens, bit by bit.
    """
    tokens, num_experts = logits.shape
    order = torch.empty(num_experts, tokens, dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=logits.device)
    pdl = pdl_options(logits.device)
    if not by_token:
        masses = torch.empty(tokens, choices, dtype=torch.float32, device=logits.device)
        block = min(next_power_of_2(tokens), RANKED_BLOCK)
        _assign_kernel[(num_experts,)](
            logits, masses, order, counts, logits.stride(0), tokens, num_experts, choices, renormalise,
            next_power_of_2(num_experts), block, num_warps=8 if block > 8 else 4, **pdl,
        )  # fmt: skip
    else:
        masses, experts = route_triton(logits, choices, False)
        block = min(next_power_of_2(tokens * choices), COLLECTED_BLOCK)
        _collect_kernel[(num_experts,)](experts, order, counts, tokens, choices, block, num_warps=16, **pdl)
    return masses, order, counts


@triton.jit
def comparable(logits):
    """NaN is the least of all, so that every token has its C experts whatever was computed for it."""
    return tl.where(logits == logits, logits, float("-inf"))


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
    row_ptr = logits_ptr + token * row_stride
    logits = tl.load(row_ptr + expert, mask=expert < num_experts, other=float("-inf")).to(tl.float32)
    masses = tl.exp(logits - tl.max(logits, axis=0))
    total = tl.sum(masses, axis=0)
    is_number = total == total
    probability = tl.where(expert < num_experts, tl.where(is_number, masses / total, 0.0), -1.0)  # C different experts also without numbers
    weights = tl.zeros([CHOICES_BLOCK], tl.float32)
    experts = tl.zeros([CHOICES_BLOCK], tl.int32)
    for index in range(choices):
        best, best_expert = tl.max(probability, axis=0, return_indices=True)
        weights = tl.where(choice == index, best, weights)
        experts = tl.where(choice == index, best_expert, experts)
        probability = tl.where(expert == best_expert, -1.0, probability)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    weights = tl.where(is_number, weights, float("nan"))
    tl.store(weights_ptr + token * choices + choice, weights, mask=choice < choices)
    tl.store(experts_ptr + token * choices + choice, experts, mask=choice < choices)


@triton.jit(do_not_specialize=["tokens"])
def _assign_kernel(
    logits_ptr, masses_ptr, order_ptr, counts_ptr, row_stride, tokens, num_experts, choices, RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program finds the tokens that have its expert among their best."""
    own = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.arange(0, EXPERTS)
    count = tl.full([], 0, tl.int32)
    for start in tl.range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        in_tokens = token < tokens
        row_ptr = logits_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * row_stride
        in_experts = (expert < num_experts)[None, :]
        logits = tl.load(row_ptr[:, None] + expert[None, :], mask=in_experts, other=float("-inf")).to(tl.float32)
        own_logit = tl.load(row_ptr + own).to(tl.float32)
        value, own_value = comparable(logits), comparable(own_logit)[:, None]
        is_before = (value > own_value) | ((value == own_value) & (expert < own)[None, :])
        rank = tl.sum(is_before.to(tl.int32), axis=1)
        most = tl.max(logits, axis=1)
        mass = tl.exp(own_logit - most)
        if not RENORMALISE:
            mass = mass / tl.sum(tl.exp(logits - most[:, None]), axis=1)
        mine = in_tokens & (rank < choices)
        assignment = token * choices + rank
        tl.store(masses_ptr + assignment, mass, mask=mine)
        chosen = mine.to(tl.int32)
        tl.store(order_ptr + own.to(tl.int64) * tokens + count + tl.cumsum(chosen, axis=0) - 1, assignment, mask=mine)
        count += tl.sum(chosen, axis=0)
    tl.store(counts_ptr + own, count)


@triton.jit(do_not_specialize=["tokens"])
def _collect_kernel(experts_ptr, order_ptr, counts_ptr, tokens, choices, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each program gathers the assignments of its expert."""
    own = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    assignments = tokens * choices
    count = tl.full([], 0, tl.int32)
    for start in tl.range(0, assignments, BLOCK, num_stages=3):
        assignment = start + tl.arange(0, BLOCK)
        mine = (tl.load(experts_ptr + assignment, mask=assignment < assignments, other=-1) == own).to(tl.int32)
        tl.store(order_ptr + own.to(tl.int64) * tokens + count + tl.cumsum(mine, axis=0) - 1, assignment, mask=mine > 0)
        count += tl.sum(mine, axis=0)
    tl.store(counts_ptr + own, count)
