"""What a worker says of a group is bounded before books are made for it."""

from typing import Any

import pytest

from services.scheduler.stream import MAX_PAGE_TABLE, MAX_PAGES, MAX_SLOT_PAGES, MAX_VOCABULARY, limits_of
from shared.errors import ProtocolError
from shared.protocol import execution_pb2 as pb

FIELDS: dict[str, Any] = {"slots": 4, "pages": 100, "page_size": 16, "max_length": 64, "max_step_tokens": 32, "vocab_size": 50}


def test_what_a_group_can_execute_is_taken_as_it_is() -> None:
    limits = limits_of(pb.WorkerGroup(**FIELDS))
    assert {name: getattr(limits, name) for name in FIELDS} == FIELDS


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0},
        {"pages": 1},
        {"pages": MAX_PAGES + 1},
        {"vocab_size": MAX_VOCABULARY + 1},
        {"slots": MAX_PAGE_TABLE, "page_size": 1, "max_length": 2},
        {"pages": MAX_PAGES, "page_size": 1, "max_length": MAX_SLOT_PAGES + 1},
    ],
)
def test_books_that_could_not_be_kept_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match="refused"):
        limits_of(pb.WorkerGroup(**FIELDS | changes))
