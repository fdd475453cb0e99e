"""The ring: every reader sees every entry, whole and in order; nothing unread is overwritten."""

import itertools
import os
import random

import numpy as np
import pytest

from services.worker.ring import CAPACITY, Kind, RingFull, RingReader, RingWriter, create_ring
from shared.protocol.plan import MAX_PLAN_BYTES


def make(readers: int) -> tuple[RingWriter, list[RingReader]]:
    ring = create_ring()
    bells = [os.eventfd(0) for _ in range(readers)]
    return RingWriter(ring, bells), [RingReader(ring, bell, rank, readers) for rank, bell in enumerate(bells)]


def payload(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def fill(writer: RingWriter, data: bytes) -> int:
    """Writes until there is no room; returns how many entries."""
    for number in itertools.count():
        try:
            writer.write(Kind.PLAN, number, data)
        except RingFull:
            return number
    raise AssertionError("a ring has an end")


def test_every_reader_gets_every_entry_also_across_the_end_of_the_data() -> None:
    writer, readers = make(3)
    sizes = random.Random(1)
    total, number = 0, 0
    while total < 5 * CAPACITY:
        batch = []
        for _ in range(sizes.randint(1, 4)):
            number += 1
            size = 4 * sizes.choice([0, 1, 13, 64, 10_000, MAX_PLAN_BYTES // 4])
            batch.append((number, payload(size, number)))
            writer.write(Kind.PLAN, *batch[-1])
            writer.write(Kind.RUN, number)
            total += size + 32
        for reader in readers:
            for plan, data in batch:
                entry = reader.read()
                assert (entry.kind, entry.plan, entry.payload.tobytes()) == (Kind.PLAN, plan, data)
                run = reader.read()
                assert (run.kind, run.plan) == (Kind.RUN, plan)
            assert reader.empty()


def test_the_slowest_reader_holds_the_writer_back() -> None:
    writer, (fast, slow) = make(2)
    data = payload(MAX_PLAN_BYTES, 1)
    written = fill(writer, data)
    assert written * MAX_PLAN_BYTES <= CAPACITY
    for _ in range(written):
        fast.read()
    with pytest.raises(RingFull):
        writer.write(Kind.PLAN, written, data)
    assert slow.read().payload.tobytes() == data
    writer.write(Kind.PLAN, written, data)
    assert [slow.read().plan for _ in range(written)] == list(range(1, written + 1))


def test_an_entry_is_a_copy() -> None:
    writer, (reader,) = make(1)
    writer.write(Kind.PLAN, 1, np.arange(4, dtype=np.int32).tobytes())
    first = reader.read().payload
    for number in range(2 * CAPACITY // MAX_PLAN_BYTES):
        writer.write(Kind.PLAN, number, bytes(MAX_PLAN_BYTES))
        reader.read()
    assert first.tolist() == [0, 1, 2, 3]
