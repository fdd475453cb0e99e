"""Token embedding over this rank's range of the vocabulary. T tokens, V_local rows of this rank, D hidden size."""

from torch import Tensor


def embedding(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """ids `[T]` int32 or int64, weight `[V_local, D]` -> `[T, D]` like weight.

    Ids outside `[first, first + V_local)` give zeros: the sum over the ranks is the embedding.
    """
    return embedding_torch(ids, weight, first)


def embedding_torch(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    local = ids.long() - first
    inside = (local >= 0) & (local < weight.shape[0])
    return weight[local.where(inside, 0)].masked_fill_(~inside[:, None], 0.0)
