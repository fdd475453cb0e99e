"""How a step's budget of tokens is shared between running streams and prompts. One function a policy, chosen by a setting."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

PREFILL_SHARE = 4  # a quarter of the budget, when decode rows alone would fill it

Policy = Callable[[int], int]  # the step's budget -> tokens of it that decode rows may take while prompts wait; prompts get the rest
PolicyName = Literal["mixed", "prefill-first", "decode-first"]


def mixed(budget: int) -> int:
    """Both in every step: no stream pauses for a prompt, no prompt waits for streams to end."""
    return budget - max(budget // PREFILL_SHARE, 1)


def prefill_first(budget: int) -> int:
    """Prompts alone while there are any: the earliest first tokens, and streams that pause meanwhile."""
    return 0


def decode_first(budget: int) -> int:
    """Prompts get what streams leave: the steadiest streams, and prompts that wait when streams fill every step."""
    return budget


POLICIES: Mapping[PolicyName, Policy] = MappingProxyType({"mixed": mixed, "prefill-first": prefill_first, "decode-first": decode_first})
