"""The model that simulations serve, of which nothing but sizes is known, and requests whose ids mean nothing."""

import numpy as np

from services.scheduler.model import Model
from services.worker.engine.simulated import Language
from shared.protocol import generation_pb2 as pb
from shared.protocol.plan import Int32s, ids_to_bytes

VOCAB_SIZE, EOS = 32_000, 2


def model(max_length: int) -> Model:
    """As a scheduler knows it."""
    return Model("simulated", VOCAB_SIZE, max_length, frozenset({EOS}), ())


def language(mean_tokens: int) -> Language:
    """What it answers: so many tokens on average."""
    return Language(VOCAB_SIZE, (EOS,), mean_tokens)


def random_ids(random: np.random.Generator, tokens: int) -> Int32s:
    """`[tokens]`, none of which ends a sequence."""
    return random.integers(EOS + 1, VOCAB_SIZE, tokens).astype(np.int32)


def submit(request: int, prompt: Int32s, max_tokens: int, *, ignore_eos: bool = False) -> pb.Submit:
    """The first attempt of a greedy request."""
    sampling = pb.Sampling(temperature=0, seed=1)
    prompt_ids = ids_to_bytes(prompt)
    return pb.Submit(request=request, attempt=1, prompt_ids=prompt_ids, max_tokens=max_tokens, ignore_eos=ignore_eos, sampling=sampling)
