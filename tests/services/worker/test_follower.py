"""A ring that is full holds the leader's entries back, and loses none."""

import asyncio
import os

from services.worker.follower import written
from services.worker.ring import CAPACITY, Kind, RingReader, RingWriter, create_ring


async def test_an_entry_waits_for_room_in_the_ring() -> None:
    descriptor, bell = create_ring(), os.eventfd(0)
    writer, reader = RingWriter(descriptor, [bell]), RingReader(descriptor, bell, 0, 1)
    half = bytes(CAPACITY // 2 - 16)  # with its header, half of the ring
    for plan in (1, 2):
        await written(writer.write, Kind.PLAN, plan, half)
    waiting = asyncio.create_task(written(writer.write, Kind.RUN, 1, b""))
    assert not (await asyncio.wait({waiting}, timeout=0.02))[0]
    assert reader.read().plan == 1
    await asyncio.wait_for(waiting, 30)
    assert [(entry.kind, entry.plan) for entry in (reader.read(), reader.read())] == [(Kind.PLAN, 2), (Kind.RUN, 1)]
    for each in (descriptor, bell):
        os.close(each)
