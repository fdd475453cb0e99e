from services.scheduler.requests import Request
from services.scheduler.waiting import SLACK, WaitingQueue
from tests.services.scheduler.build import make_request


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    return queue


def test_resumed_then_priority_then_arrival() -> None:
    first, second = make_request(1, [1], 9), make_request(2, [1], 9)
    urgent, resumed = make_request(3, [1], 9, priority=5), make_request(4, [1], 9, output=(2, 3))
    assert queue_of(first, second, urgent, resumed).drain() == [resumed, urgent, first, second]


def test_a_removed_request_is_not_seen_again() -> None:
    first, second = make_request(1, [1, 2], 9), make_request(2, [1, 2, 3], 9)
    queue = queue_of(first, second)
    queue.remove(first)
    assert queue.head() is second
    assert (len(queue), queue.tokens) == (1, 3)
    assert queue.drain() == [second]
    assert (len(queue), queue.tokens, queue.head()) == (0, 0, None)


def test_a_newer_attempt_takes_its_own_place() -> None:
    older, newer = make_request(1, [1], 9), make_request(1, [1], 9, attempt=2)
    queue = queue_of(older)
    queue.remove(older)
    queue.push(newer)
    assert queue.drain() == [newer]


def test_cancelled_requests_leave_no_trace() -> None:
    queue = queue_of(make_request(0, [1], 9))
    for number in range(1, 10_000):
        request = make_request(number, [1], 9)
        queue.push(request)
        queue.remove(request)
    assert queue._entries <= 2 + SLACK + 1


def test_a_request_that_is_passed_over_again_and_again_leaves_no_trace() -> None:
    request = make_request(0, [1], 9)
    queue = queue_of(request)
    for _ in range(10_000):
        queue.set_aside(request)
        queue.put_back(request)
    assert queue._entries <= 2 + SLACK + 1
    assert queue.drain() == [request]
