"""Outbox and received: heartbeats when idle, no silence unnoticed, no unbounded queue."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

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
    outbox: Outbox[int] = Outbox(lambda: -1)
    for number in range(10):
        outbox.put(number)
    assert len(outbox) == 3
    with pytest.raises(PeerLost, match="left 3 messages unread"):
        await anext(aiter(outbox))


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
