"""The least time that a step can take at a device's ceilings, from what it must read and compute: no engine is faster.

Bytes are those of bfloat16. Weights are read once a step, the KV cache once a step, the embedding table not at all unless it is the
output matrix too; of experts, those that so many tokens hit when they choose at random.
"""

from benchmarks.ceilings import Ceilings
from benchmarks.workload import Task
from services.worker.engine.roofline import ELEMENT_BYTES, Shape


def weights_read(shape: Shape, tokens: int) -> float:
    """Bytes of one step of so many tokens that yields at least one."""
    hit = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
    layer = shape.attention_weights + hit * shape.experts * shape.expert_weights
    return ELEMENT_BYTES * (shape.layers * layer + shape.vocab_size * shape.hidden_size)


def linear_operations(shape: Shape, tokens: int, sampled: int) -> float:
    """Of the matrix products of one step; `sampled` rows yield a token."""
    layer = shape.attention_weights + shape.experts_per_token * shape.expert_weights
    return 2.0 * (shape.layers * layer * tokens + shape.vocab_size * shape.hidden_size * sampled)


def prefill_operations(shape: Shape, lengths: list[int]) -> float:
    """Of whole prompts, with causal attention."""
    attention = sum(2.0 * shape.layers * shape.heads * shape.head_dim * length**2 for length in lengths)
    return linear_operations(shape, sum(lengths), len(lengths)) + attention


def decode_step_s(shape: Shape, rows: int, context: float, ceilings: Ceilings) -> float:
    """Reading alone; `context` tokens a row, on average."""
    return (weights_read(shape, rows) + rows * context * shape.kv_bytes_per_token) / ceilings.read


def offline_s(shape: Shape, task: Task, ceilings: Ceilings) -> float:
    """All prompts prefilled in a burst, then decoded together, each until it has its tokens. Products and reading of weights overlap."""
    total = prefill_operations(shape, [len(prompt) for prompt in task.prompts]) / ceilings.matrix
    ends = sorted(zip(task.max_tokens, map(len, task.prompts), strict=True))
    rows, prompt_tokens = len(ends), task.prompt_tokens
    for step in range(1, max(task.max_tokens)):  # the first tokens come with the prefill
        while len(ends) - rows < len(ends) and ends[len(ends) - rows][0] <= step:
            prompt_tokens -= ends[len(ends) - rows][1]
            rows -= 1
        context = prompt_tokens + rows * step
        products = linear_operations(shape, rows, rows) / ceilings.matrix
        total += max(weights_read(shape, rows) / ceilings.read, products) + context * shape.kv_bytes_per_token / ceilings.read
    return total
