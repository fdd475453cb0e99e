"""What runs Lockstep on one machine. `from services.local import LLM` is the offline API."""

import os

# gRPC would prepare each process that the caller forks for speaking gRPC; beside a thread that does so too, some of those end by SIGSEGV,
# whatever they were forked for. It reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from services.local.llm import LLM, Completion
from services.local.prompts import InvalidPrompt, Sampling
from services.local.session import Logprobs, RequestFailed

__all__ = ["LLM", "Completion", "InvalidPrompt", "Logprobs", "RequestFailed", "Sampling"]
