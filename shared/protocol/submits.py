"""Submits that are ready at the same time travel in one message: the scheduler then sees them together, and reads one message."""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate, takewhile

from shared.protocol.generation_pb2 import GenerationSessionRequest

MAX_SUBMITS = 64  # of one message: some 10 ms of the scheduler's time
MAX_SUBMITS_BYTES = 1 << 20  # of one message, but for a single one that is larger
# Of a message, where about two such hold all that is queued, some 17,000 tokens of prompts: a step. The plan for the second is made and
# sent while the device computes that of the first: 16 prompts of 1,024 tokens at an idle H200 with Qwen3-0.6B take 41.0 and 41.4 ms in
# two messages, 43.0 and 43.2 in one. Larger crowds fill steps of their own, and would only come apart.
HALF_CROWD_BYTES = 36_000


def next_message(messages: deque[GenerationSessionRequest]) -> GenerationSessionRequest:
    """Takes the next message to send from a queue; of Submits that follow each other there, several as one."""
    first = messages.popleft()
    if not (first.HasField("submit") and messages and messages[0].HasField("submit")):
        return first
    together, size = GenerationSessionRequest(), first.ByteSize()
    most = HALF_CROWD_BYTES if _is_at_most(2 * HALF_CROWD_BYTES - size, messages) else MAX_SUBMITS_BYTES
    together.submits.submits.append(first.submit)
    while messages and messages[0].HasField("submit") and len(together.submits.submits) < MAX_SUBMITS:
        size += messages[0].ByteSize()
        if size > most:
            break
        together.submits.submits.append(messages.popleft().submit)
    return together


def _is_at_most(size: int, messages: Iterable[GenerationSessionRequest]) -> bool:
    """Whether the Submits that come first are so long at most, all together."""
    sizes = (message.ByteSize() for message in takewhile(lambda message: message.HasField("submit"), messages))
    return all(total <= size for total in accumulate(sizes))
