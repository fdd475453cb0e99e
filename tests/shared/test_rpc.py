"""Outbox and received: heartbeats when idle, no silence unnoticed, no unbounded queue."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from shared import rpc
from shared.errors import PeerLost, ProtocolError
from shared.rpc import Outbox, StreamEnded, check_version, received


async def test_messages_keep_their_order_and_close_ends_after_them() -> None:
    outbox: Outbox[int] = Outbox(lambda: -1)
    for number in range(5):
        outbox.put(number)
    outbox.close()
    outbox.put(9)
    assert [message async for message in outbox] == [0, 1, 2, 3, 4]


async def test_an_idle_outbox_sends_heartbeats() -> None:
    outbox: Outbox[str] = Outbox(lambda: "heartbeat")
    messages = aiter(outbox)
    start = time.monotonic()
    assert [await anext(messages), await anext(messages)] == ["heartbeat", "heartbeat"]
    assert 2 * rpc.HEARTBEAT_S * 0.9 < time.monotonic() - start < rpc.SILENCE_S


async def test_a_put_wakes_the_writer_at_once() -> None:
    outbox: Outbox[str] = Outbox(lambda: "heartbeat")
    writer = asyncio.ensure_future(anext(aiter(outbox)))
    await asyncio.sleep(0)
    outbox.put("message")
    assert await writer == "message"


async def test_an_unread_outbox_ends_instead_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_UNSENT_MESSAGES", 3)
    monkeypatch.setattr(rpc, "UNREAD_S", 0.0)
    outbox: Outbox[int] = Outbox(lambda: -1)
    for number in range(10):
        outbox.put(number)
    assert len(outbox) == 3
    with pytest.raises(PeerLost, match="left 3 messages unread"):
        await anext(aiter(outbox))


async def test_a_burst_has_its_time_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_UNSENT_MESSAGES", 3)
    outbox: Outbox[int] = Outbox(lambda: -1)
    for number in range(10):
        outbox.put(number)
    messages = aiter(outbox)
    assert [await anext(messages) for _ in range(10)] == list(range(10))


async def test_what_is_sent_now_and_then_is_unread_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_UNSENT_MESSAGES", 3)
    clock = itertools.count()
    monkeypatch.setattr(rpc, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # a second passes with each put
    outbox: Outbox[int] = Outbox(lambda: -1)
    messages = aiter(outbox)
    for number in range(20):
        outbox.put(number)
        if number % 3 == 0 and number < 6:
            assert await anext(messages) == number // 3
    assert len(outbox) == 3
    with pytest.raises(PeerLost, match="left 3 messages unread"):
        await anext(messages)


async def test_a_call_that_is_cancelled_on_this_side_is_an_end_of_the_stream() -> None:
    async def cancelled() -> AsyncIterator[int]:
        yield 1
        raise asyncio.CancelledError

    messages = received(cancelled(), "the peer")
    assert await anext(messages) == 1
    with pytest.raises(StreamEnded, match="the peer: the call was cancelled"):
        await anext(messages)


async def test_a_reader_that_is_cancelled_is_cancelled() -> None:
    async def silent() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1

    reading = asyncio.ensure_future(anext(received(silent(), "the peer")))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_silence_ends_a_stream() -> None:
    async def silent() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    messages = received(silent(), "the peer", silence_s=0.05)
    assert await anext(messages) == 1
    with pytest.raises(StreamEnded, match=r"the peer sent nothing for 0\.05 s"):
        await anext(messages)


async def test_a_busy_event_loop_blames_no_peer() -> None:
    came = asyncio.Event()

    async def stream() -> AsyncIterator[int]:
        yield 1
        await came.wait()
        yield 2

    messages = received(stream(), "the peer", silence_s=0.5)
    assert await anext(messages) == 1
    second = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    time.sleep(0.5 + rpc.LATE_S + 0.1)  # nothing runs on this loop, while the peer goes on
    asyncio.get_running_loop().call_later(0.02, came.set)
    assert await second == 2


async def test_a_stream_that_ends_in_good_order_just_ends() -> None:
    async def short() -> AsyncIterator[int]:
        for number in itertools.islice(itertools.count(), 3):
            yield number

    assert [message async for message in received(short(), "the peer")] == [0, 1, 2]


def test_unequal_majors_are_refused_naming_both() -> None:
    check_version("1.7", "the worker")
    for theirs in ("2.0", ""):
        with pytest.raises(ProtocolError, match=r"the worker speaks protocol .*, we speak 1\.0"):
            check_version(theirs, "the worker")
