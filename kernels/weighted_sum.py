"""The sum of what a token's experts made of it, alone or with the residual addition and the RMSNorm behind it.

T tokens, D hidden size, C experts a token; row t * C + c of the results is what the c-th expert of token t made.

The experts are added in their order, so a token's bits depend neither on the other tokens nor on what follows the sum. With the norm a
program has whole rows, in the tile of the norm alone. That pays for many tokens as for few: two launches write D sums and read them again
beside the C * D results, and programs of 8 warps with what 8 experts made on its way fit three times on a multiprocessor.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.rms_norm import normed, tile

# With this bound the compiler gives registers to all of a thread's loads at a time; without one it saves them, and waits for each in turn.
MOST_REGISTERS = 128


def weighted_sum_triton(results: Tensor, masses: Tensor, renormalise: bool) -> Tensor:
    """results `[T * C, D]`, masses `[T, C]` float32 as of `assign_triton`, T > 0 -> `[T, D]` like results, summed in float32.

    On a GPU masses must not come from the kernel just before: they are read ahead of its end.
    """
    (tokens, choices), hidden = masses.shape, results.shape[1]
    y, block = results.new_empty(tokens, hidden), min(next_power_of_2(hidden), 1024)
    _weighted_sum_kernel[(tokens, cdiv(hidden, block))](
        results, masses, y, hidden, choices, renormalise, block,
        num_warps=4, maxnreg=MOST_REGISTERS, **pdl_options(results.device),
    )  # fmt: skip
    return y


def weighted_sum_add_norm_triton(
    results: Tensor, masses: Tensor, renormalise: bool, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:  # fmt: skip
    """Adds `weighted_sum_triton` of the first three to residual `[T, D]` IN PLACE and returns the RMSNorm of that, with weight `[D]`.

    The bits are those of the two apart; of float32 with one expert a token they need not be, since the multiplication may be fused with
    the addition there. On a GPU neither masses nor residual may come from the kernel just before.
    """
    (tokens, choices), hidden = masses.shape, results.shape[1]
    y = results.new_empty(tokens, hidden)
    rows, block, warps = tile(hidden)
    _weighted_sum_add_norm_kernel[(cdiv(tokens, rows),)](
        results, masses, residual, weight, y, tokens, hidden, eps, choices, renormalise, rows, block,
        num_warps=warps, maxnreg=MOST_REGISTERS, **pdl_options(results.device),
    )  # fmt: skip
    return y


@triton.jit
def _weighted_sum_kernel(
    results_ptr, masses_ptr, y_ptr, size, CHOICES: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    masses = _masses(masses_ptr + row * CHOICES, row >= 0, CHOICES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = _sum(results_ptr + row * CHOICES * size + column, column < size, masses, size, CHOICES, RENORMALISE)
    tl.store(y_ptr + row * size + column, total, mask=column < size)


@triton.jit(do_not_specialize=["rows"])
def _weighted_sum_add_norm_kernel(
    results_ptr, masses_ptr, residual_ptr, weight_ptr, y_ptr, rows, size, eps,
    CHOICES: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    masses = _masses(masses_ptr + row * CHOICES, row < rows, CHOICES)
    place = residual_ptr + row * size + column
    residual = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # older than the three kernels that made the results
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = _sum(results_ptr + row * CHOICES * size + column, inside, masses, size, CHOICES, RENORMALISE)
    total = (total.to(results_ptr.dtype.element_ty).to(tl.float32) + residual).to(residual_ptr.dtype.element_ty)
    tl.store(place, total, mask=inside)
    tl.store(y_ptr + row * size + column, normed(total.to(tl.float32), weight, size, eps), mask=inside)


@triton.jit
def _masses(first_ptr, inside, CHOICES: tl.constexpr):
    """A tuple of the masses of a row's experts."""
    masses = tl.tuple(())
    for choice in tl.static_range(CHOICES):
        masses += (tl.load(first_ptr + choice, mask=inside, other=1.0),)
    return masses


@triton.jit
def _sum(first_ptr, inside, masses, size, CHOICES: tl.constexpr, RENORMALISE: tl.constexpr):
    """first_ptr: to what the first expert made, from where what the others made stands a row apart."""
    results = tl.tuple(())
    for choice in tl.static_range(CHOICES):
        results += (tl.load(first_ptr + choice * size, mask=inside, other=0.0),)
    whole = 1.0
    if RENORMALISE:
        whole = masses[0]
        for choice in tl.static_range(1, CHOICES):
            whole += masses[choice]
    total = masses[0] / whole * results[0].to(tl.float32)
    for choice in tl.static_range(1, CHOICES):
        total = tl.fma(tl.broadcast_to(masses[choice] / whole, total.shape), results[choice].to(tl.float32), total)
    return total
