"""`python -m tests.gpu.sanitized FOLDER`: a few steps of a checkpoint, greedy and sampled, for compute-sanitizer to look at.

Neither pytest nor transformers is imported: the sanitizer gives up on a process that is slow to make its first call of CUDA.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from tests.services.worker.models.group import Job, Local

LENGTHS = (1, 2, 17, 64, 300)
LEAST_ID, END_ID = 3, 257


def main() -> None:
    folder, generator = Path(sys.argv[1]), np.random.default_rng(0)
    prompts = tuple(tuple(generator.integers(LEAST_ID, END_ID, length).tolist()) for length in LENGTHS)
    settings = {"cuda_graphs": False, "dtype": "float32"}
    group = Local()
    for chunk, sampling in ((1000, {}), (16, {"temperature": 0.8, "top_k": 20, "top_p": 0.9})):
        (outcome,) = group.run(Job(folder, prompts, 4, chunk, sampling=sampling, spec=settings))
        assert (outcome.tokens >= 0).all()
    print(f"done on {'a GPU' if torch.cuda.is_initialized() else 'a CPU'}")


if __name__ == "__main__":
    main()
