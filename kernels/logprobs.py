"""What log-probabilities are made of: each row's log-sum-exp, the logit of one id, and the largest logits.

B rows, L columns of logits: the vocabulary ids from `first` on. With the vocabulary spread over ranks, each computes its part:
parts go together by log-sum-exp, by maximum, and by sorting.
"""

import torch
from torch import Tensor

NO_ID = -1  # of a largest logit, where there are fewer columns than were asked for


def logprobs(logits: Tensor, chosen: Tensor, k: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits `[B, L]` float32, chosen `[B]` int32.

    Returns, float32 but for the ids: log-sum-exp `[B]`; the chosen id's logit `[B]`, -inf for an id that is not among the columns; ids
    `[B, k]` int32 and logits `[B, k]` of the largest, by (logit descending, id ascending), NO_ID and -inf past the last column.
    A log-probability is a logit less the log-sum-exp. Rows with a NaN give no meaningful values.
    """
    return logprobs_torch(logits, chosen, k, first)


def logprobs_torch(logits: Tensor, chosen: Tensor, k: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = logits.shape
    place = chosen.long() - first
    inside = (place >= 0) & (place < columns)
    chosen_logits = logits.gather(1, place.where(inside, 0)[:, None])[:, 0].where(inside, -torch.inf)

    bits = (logits + 0.0).view(torch.int32)  # -0 and 0 are equal
    order = bits.where(bits >= 0, bits ^ 0x7FFFFFFF).long()
    keys = (order << 32) | (2**32 - 1 - torch.arange(columns, device=logits.device))
    top = keys.topk(min(k, columns)).indices
    top_ids = logits.new_full((rows, k), NO_ID, dtype=torch.int32)
    top_logits = logits.new_full((rows, k), -torch.inf)
    top_ids[:, : top.shape[1]] = top + first
    top_logits[:, : top.shape[1]] = logits.gather(1, top)
    return logits.logsumexp(dim=1), chosen_logits, top_ids, top_logits
