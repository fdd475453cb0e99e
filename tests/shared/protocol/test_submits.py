"""Submits that are queued one behind the other travel together, in order, within bounds."""

from collections import deque

from shared.protocol.generation_pb2 import Cancel, GenerationSessionRequest, Submit
from shared.protocol.submits import MAX_SUBMITS, MAX_SUBMITS_BYTES, next_message


def submit(number: int, prompt_bytes: int = 4) -> GenerationSessionRequest:
    return GenerationSessionRequest(submit=Submit(request=number, attempt=1, prompt_ids=bytes(prompt_bytes)))


def all_of(*messages: GenerationSessionRequest) -> list[GenerationSessionRequest]:
    queue, taken = deque(messages), []
    while queue:
        taken.append(next_message(queue))
    return taken


def numbers(message: GenerationSessionRequest) -> list[int]:
    return [each.request for each in message.submits.submits] or [message.submit.request]


def test_those_behind_each_other_go_together_and_nothing_overtakes() -> None:
    cancel = GenerationSessionRequest(cancel=Cancel(request=2, attempt=1))
    taken = all_of(submit(1), submit(2), submit(3), cancel, submit(4), cancel)
    assert [message.WhichOneof("message") for message in taken] == ["submits", "cancel", "submit", "cancel"]
    assert [numbers(taken[0]), numbers(taken[2])] == [[1, 2, 3], [4]]


def test_a_message_has_so_many_at_most() -> None:
    taken = all_of(*(submit(number) for number in range(2 * MAX_SUBMITS + 1)))
    assert [len(numbers(message)) for message in taken] == [MAX_SUBMITS, MAX_SUBMITS, 1]
    assert [number for message in taken for number in numbers(message)] == list(range(2 * MAX_SUBMITS + 1))


def test_a_message_is_so_long_at_most_but_for_one_that_is_longer() -> None:
    taken = all_of(
        submit(1, MAX_SUBMITS_BYTES), submit(2, MAX_SUBMITS_BYTES // 2), submit(3, MAX_SUBMITS_BYTES // 3), submit(4, MAX_SUBMITS_BYTES)
    )
    assert [numbers(message) for message in taken] == [[1], [2, 3], [4]]
    assert taken[1].ByteSize() < MAX_SUBMITS_BYTES
