"""What runs Lockstep on one machine. `from services.local import LLM` is the offline API."""

from services.local.llm import LLM, Completion
from services.local.prompts import InvalidPrompt, Sampling
from services.local.session import Logprobs, RequestFailed

__all__ = ["LLM", "Completion", "InvalidPrompt", "Logprobs", "RequestFailed", "Sampling"]
