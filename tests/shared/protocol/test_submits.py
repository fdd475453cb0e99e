"""Submits that are queued one behind the other travel together, in order, within bounds."""

from collections import deque

from shared.protocol.generation_pb2 import Cancel, GenerationSessionRequest, Submit
from shared.protocol.submits import HALF_CROWD_BYTES, MAX_SUBMITS, MAX_SUBMITS_BYTES, next_message


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


def test_a_crowd_that_two_messages_hold_goes_in_two_and_a_larger_one_in_whole_messages() -> None:
    assert [len(numbers(message)) for message in all_of(*(submit(number, 4096) for number in range(16)))] == [8, 8]
    assert [len(numbers(message)) for message in all_of(*(submit(number, 4096) for number in range(8)))] == [8]
    assert [len(numbers(message)) for message in all_of(*(submit(number, 4096) for number in range(32)))] == [32]
    cancel = GenerationSessionRequest(cancel=Cancel(request=2, attempt=1))
    apart = all_of(*(submit(number, HALF_CROWD_BYTES // 3) for number in range(4)), cancel, submit(4, HALF_CROWD_BYTES))
    assert [message.WhichOneof("message") for message in apart] == ["submits", "submits", "cancel", "submit"]
