"""Mixture of experts: each token's best experts by the router's logits, and the weighted sum of what they make of it.

T tokens, D hidden size, E experts, C experts a token chooses, I intermediate size of an expert on this rank, A = T * C assignments:
number t * C + c is the c-th expert of token t.

How the products of the experts run is in `moe_grouped`, their sum in `weighted_sum`; with what tiles, in the table of the GPU.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import HOPPER, capability
from kernels.moe_grouped import GroupedConfig, expert_results_triton, moe_grouped_triton
from kernels.rms_norm import add_rms_norm_torch
from kernels.routing import route_torch
from kernels.tuning import entries, entry_for, remembered
from kernels.weighted_sum import weighted_sum_add_norm_triton

Config = tuple[GroupedConfig, GroupedConfig]  # for gate and up, and for down


def moe(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool) -> Tensor:
    """x `[T, D]`, gate_up `[E, 2 * I, D]` (gate first), down `[E, D, I]`, logits `[T, E]` of the router -> `[T, D]`.

    The sum of `silu_and_mul(x @ gate_up.T) @ down.T` of each token's `choices` experts, weighted as `route` does, in float32.
    Raises ValueError if x or a weight is not contiguous.
    """
    _check(x=x, gate_up=gate_up, down=down)
    return (moe_triton if x.is_cuda else moe_torch)(x, gate_up, down, logits, choices, renormalise)


def moe_add_norm(
    x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool, residual: Tensor, norm: Tensor, eps: float
) -> Tensor:
    """Adds `moe` of the first six to residual `[T, D]` IN PLACE and returns the RMSNorm of the sum, with norm `[D]`, `[T, D]` like x.

    Residual and result have the bits that `moe` and `add_rms_norm` give. Raises ValueError if x, a weight or residual is not contiguous.
    """
    _check(x=x, gate_up=gate_up, down=down, residual=residual)
    compute = moe_add_norm_triton if x.is_cuda else moe_add_norm_torch
    return compute(x, gate_up, down, logits, choices, renormalise, residual, norm, eps)


def _check(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got {tuple(tensor.shape)} with strides {tensor.stride()}")


def fixed_moe(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool) -> Tensor:
    """`moe` on a GPU with one shape of tiles for any number of tokens: a token's result does not depend on the others, bit by bit."""
    first, second = FIXED[x.element_size()]
    return moe_grouped_triton(x, gate_up, down, logits, choices, renormalise, first, second, by_token=True)


def moe_torch(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool) -> Tensor:
    weights, chosen = route_torch(logits, choices, renormalise)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        tokens, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        out.index_add_(0, tokens, (F.silu(gate) * up) @ down[expert].float().T * weights[tokens, choice, None])
    return out.to(x.dtype)


def moe_add_norm_torch(
    x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool, residual: Tensor, norm: Tensor, eps: float
) -> Tensor:
    return add_rms_norm_torch(moe_torch(x, gate_up, down, logits, choices, renormalise), residual, norm, eps)


def moe_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool, tuned: Config | None = None
) -> Tensor:
    if len(x) == 0:
        return torch.empty_like(x)
    tuned = tuned or config(x.device, x.dtype, len(x), choices, *down.shape)
    return moe_grouped_triton(x, gate_up, down, logits, choices, renormalise, *tuned)


def moe_add_norm_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool, residual: Tensor, norm: Tensor, eps: float
) -> Tensor:
    if len(x) == 0:
        return torch.empty_like(x)
    tuned = config(x.device, x.dtype, len(x), choices, *down.shape)
    results, masses = expert_results_triton(x, gate_up, down, logits, choices, renormalise, *tuned)
    return weighted_sum_add_norm_triton(results, masses, renormalise, residual, norm, eps)


FIXED = {
    2: (GroupedConfig(64, 64, 64, 4, 3, 0, 0, 0), GroupedConfig(64, 128, 64, 4, 3, 0, 0, 0)),
    4: (GroupedConfig(16, 32, 32, 4, 1, 0, 0, 0), GroupedConfig(16, 32, 32, 4, 1, 0, 0, 0)),
}  # by element bytes


def config_of(entry: Sequence[int]) -> Config:
    """Of an entry of the table: the numbers of both."""
    size = len(GroupedConfig._fields)
    return GroupedConfig(*entry[:size]), GroupedConfig(*entry[size:])


@remembered
def config(device: torch.device, dtype: torch.dtype, tokens: int, choices: int, experts: int, hidden: int, inner: int) -> Config:
    """Of the table, the least entry for so many tokens or the greatest; without one, what fits every GPU of its kind."""
    found = entries(device, dtype, "moe", f"{experts}x{choices}x{hidden}x{inner}")
    if found:
        return config_of(entry_for(found, tokens) or found[str(max(map(int, found)))])
    if dtype.itemsize != 2:
        return FIXED[dtype.itemsize]
    mean = tokens * choices / experts
    if mean <= 8:
        return GroupedConfig(16, 32, 256, 4, 3, 0, 0, 0), GroupedConfig(16, 64, 128, 4, 4, 0, 0, 0)
    if mean <= 32:
        return GroupedConfig(32, 64, 128, 4, 3, 0, 0, 0), GroupedConfig(32, 64, 128, 4, 3, 0, 0, 0)
    if mean <= 128 or capability(device) < HOPPER:
        return FIXED[dtype.itemsize]
    return GroupedConfig(128, 128, 64, 8, 3, 1, 0, 0), GroupedConfig(128, 256, 64, 8, 3, 1, 0, 0)
