"""Pearson's test, for samplers: do ids come as often as they should?"""

import torch
from torch import Tensor

LEAST_EXPECTED = 8  # of a class: ids that are rarer are put together
Z = 5.0  # standard deviations: a right sampler fails once in three million seeds, and seeds are fixed


def assert_distributed(ids: Tensor, probability: Tensor) -> None:
    """ids `[N]` integers, each drawn with these probabilities `[V]`, float64; an id of probability 0 must not come."""
    probability = probability.double().cpu()
    counts = torch.bincount(ids.long().cpu(), minlength=len(probability)).double()
    assert len(counts) == len(probability), "an id past the last"
    assert counts[probability == 0].sum() == 0, "ids that were dropped"
    expected = probability * len(ids)
    common = expected >= LEAST_EXPECTED
    classes = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
    seen, wanted = (torch.cat(parts) for parts in zip(*classes, strict=True))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(seen) - 1
    assert freedom > 0, "nothing to compare"
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)  # Wilson and Hilferty: the cube root is nearly normal
    assert statistic < freedom * (1 - spread + Z * spread**0.5) ** 3, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"
