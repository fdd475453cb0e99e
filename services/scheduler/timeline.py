"""What one request went through, event by event and bounded; of its tokens only numbers.

    queued -> admitted -> chunk ... chunk -> first_token -> (preempted -> admitted -> ... | queued elsewhere -> ...) -> ended

A group's events have its name. From them follow the phases: queue, until there is a slot; prefill, until a token; decode.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

FIRST_EVENTS, LAST_EVENTS = 48, 16  # that are kept of a request: a prompt of a million tokens has thousands of chunks

What = Literal["queued", "held", "admitted", "chunk", "first_token", "preempted", "ended"]


class Event(NamedTuple):
    """`tokens`, `known`: admitted - to prefill, and how many of them came from the cache; chunk - computed, after so many;
    else - of the completion so far, and 0."""

    at: float  # seconds on the scheduler's clock
    what: What
    group: str = ""
    tokens: int = 0
    known: int = 0


class Phase(NamedTuple):
    """A part of the way. A request that was preempted or moved has several of a kind."""

    name: Literal["queue", "prefill", "decode"]
    group: str
    began_at: float
    ended_at: float
    tokens: int  # prefill: computed; decode: of the completion; else 0
    cached_tokens: int  # of a prefill
    chunks: int  # of a prefill


class Timeline:
    """The first events and the last ones; those between are counted, once there are too many."""

    __slots__ = ("_first", "_last", "dropped")

    def __init__(self) -> None:
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=LAST_EVENTS)
        self.dropped = 0

    def add(self, at: float, what: What, group: str = "", tokens: int = 0, known: int = 0) -> None:
        event = Event(at, what, group, tokens, known)
        if len(self._first) < FIRST_EVENTS:
            self._first.append(event)
        else:
            self.dropped += len(self._last) == LAST_EVENTS
            self._last.append(event)

    def __iter__(self) -> Iterator[Event]:
        """A copy: may be walked in another thread than the one that adds."""
        return chain(self._first.copy(), self._last.copy())


def phases(timeline: Timeline, arrived_at: float) -> list[Phase]:
    """The phases that have ended, in order. Where events were dropped, their chunks and tokens are missing from the sums."""
    found: list[Phase] = []
    began_at, group = arrived_at, ""
    tokens = cached_tokens = chunks = completion = 0
    name: Literal["queue", "prefill", "decode"] = "queue"
    for event in timeline:
        match event.what:
            case "admitted":
                found.append(Phase("queue", event.group, began_at, event.at, 0, 0, 0))
                name, began_at, cached_tokens, tokens, chunks = "prefill", event.at, event.known, 0, 0
            case "chunk":
                tokens, chunks = tokens + event.tokens, chunks + 1
            case "first_token":
                found.append(Phase("prefill", group, began_at, event.at, tokens, cached_tokens, chunks))
                name, began_at, completion = "decode", event.at, event.tokens - 1
            case "preempted" | "queued" | "held" | "ended":
                if name == "prefill":
                    found.append(Phase("prefill", group, began_at, event.at, tokens, cached_tokens, chunks))
                elif name == "decode":
                    found.append(Phase("decode", group, began_at, event.at, event.tokens - completion, 0, 0))
                elif event.what == "ended":
                    found.append(Phase("queue", group, began_at, event.at, 0, 0, 0))
                if name != "queue":
                    name, began_at = "queue", event.at
        group = event.group or group
    return found


def text(timeline: Timeline, arrived_at: float) -> str:
    """One line: each event with the seconds since the request's arrival."""
    words = []
    for event in timeline:
        numbers = f" {event.tokens} after {event.known}" if event.what in ("admitted", "chunk") else ""
        where = f" at {event.group}" if event.what in ("queued", "admitted") and event.group else ""
        words.append(f"{event.at - arrived_at:.4f} {event.what}{where}{numbers}")
    return "; ".join(words) + (f" ({timeline.dropped} more between)" if timeline.dropped else "")
