"""Log-probabilities for engines that compute none: the n-th likeliest id has probability 2**-n, and what comes is always the likeliest."""

import numpy as np

from shared.protocol.logprobs import LOGPROB, MAX_TOP_LOGPROBS, NO_TOP_ID, Logprobs
from shared.protocol.plan import Int32s, Plan, RowFlag


def invented(rows: Int32s, positions: Int32s, ids: Int32s, vocab_size: int) -> Logprobs:
    """Of tokens `[n]`: the plan's rows, the positions, the ids."""
    records = np.empty(len(ids), dtype=LOGPROB)
    ranks = np.arange(MAX_TOP_LOGPROBS)
    records["row"], records["position"], records["logprob"] = rows, positions, -np.log(2)
    records["top_ids"] = np.where(ranks < vocab_size, (ids[:, None] + ranks) % vocab_size, NO_TOP_ID)
    records["top_logprobs"] = np.where(ranks < vocab_size, -np.log(2) * (ranks + 1), -np.inf)
    return records


def invented_scores(plan: Plan, vocab_size: int) -> Logprobs:
    """Of the ids of the prefill rows that a plan wants scored; a prompt's first has none."""
    rows = np.repeat(np.arange(len(plan.prefill_slots), dtype=np.int32), plan.prefill_lengths)
    starts = np.cumsum(plan.prefill_lengths) - plan.prefill_lengths
    positions = (plan.prefill_starts - starts)[rows] + np.arange(len(plan.prefill_ids))
    wanted = ((plan.prefill_flags[rows] & RowFlag.SCORE) != 0) & (positions > 0)
    return invented(len(plan.decode_slots) + rows[wanted], positions[wanted], plan.prefill_ids[wanted], vocab_size)
