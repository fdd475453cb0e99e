"""The next token of every row. B rows, V columns of logits: the vocabulary ids from `first` on."""

import torch
from torch import Tensor

from kernels.noise import gumbel

GREEDY_BELOW = 1e-5  # temperature under which a row is greedy: dividing by less overflows float32
FAILED = -2  # the id of a row whose logits hold a NaN


def greedy(logits: Tensor) -> Tensor:
    """logits `[B, V]` float32 -> `[B]` int32: the column of the largest logit, the lowest of equals; -2 for a row with a NaN."""
    return greedy_torch(logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """logits `[B, V]`, temperature, top_p, min_p `[B]` float32, top_k, positions `[B]` int32, seeds `[B]` int64 -> ids `[B]` int32.

    Each filter keeps a prefix of the ids ordered by (logit descending, id ascending): the first `top_k` (0 or less: all); of
    these, renormalised, up to and including the one that crosses `top_p` (at least the first); those of probability at least
    `min_p` times the largest. Then `argmax(logit / temperature + noise)` over the ids kept, the noise a function of (seed,
    position, id) alone. Temperature 0 (below 1e-5) is greedy. A row with a NaN gives -2. A row's id depends on that row only.
    """
    return sample_torch(logits, temperature, top_k, top_p, min_p, seeds, positions, first)


def greedy_torch(logits: Tensor) -> Tensor:
    # argmax takes a NaN for the largest and the first of equals, so the NaN check is one element a row.
    values, ids = logits.max(dim=-1)
    return ids.int().masked_fill_(values.isnan(), FAILED)


def sample_torch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    random = temperature >= GREEDY_BELOW
    scaled = logits / temperature.where(random, 1.0)[:, None]
    filtered = random & (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0))
    if bool(filtered.any()):
        scaled[filtered] = _filter(scaled[filtered], top_k[filtered], top_p[filtered], min_p[filtered])
    if bool(random.any()):
        ids = torch.arange(first, first + logits.shape[1], device=logits.device)
        scaled[random] += gumbel(seeds[random], positions[random], ids)
    ids = greedy_torch(scaled)
    return torch.where(logits.isnan().any(dim=1), FAILED, ids + first)


def _filter(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """scaled `[B, V]` with -inf in place of what the three filters drop."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    keep = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    probability = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep &= probability >= min_p[:, None] * probability[:, :1]
    keep[:, 0] = True
    return torch.full_like(scaled, -torch.inf).scatter_(1, order, ordered.masked_fill(~keep, -torch.inf))
