"""What a request went through: event by event, as phases, as a line; bounded, and without a token."""

import json
import logging
from random import Random

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.scheduler.debug import groups_page
from services.scheduler.ends import Finished
from services.scheduler.history import MAX_ENDED, MAX_LISTED, History
from services.scheduler.requests import Request, RequestTimes
from services.scheduler.timeline import FIRST_EVENTS, LAST_EVENTS, Phase, Timeline, phases, text
from shared.protocol.generation_pb2 import FINISH_REASON_LENGTH
from shared.protocol.plan import Limits
from tests.services.scheduler.build import make_request
from tests.services.scheduler.test_group import Harness
from tests.services.scheduler.test_prefix_sharing import PROMPT, Sharing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDED = Finished(FINISH_REASON_LENGTH)
TIMES = RequestTimes(arrived_at=1.0, admitted_at=1.5, first_token_at=2.0, ended_at=4.5)


def whole(request: Request) -> list[tuple[str, int, int]]:
    return [(event.what, event.tokens, event.known) for event in request.timeline]


def preempted() -> Timeline:
    timeline = Timeline()
    timeline.add(1.0, "queued", "blue")
    timeline.add(1.5, "admitted", "blue", 40, 16)
    timeline.add(1.5, "chunk", "blue", 20, 16)
    timeline.add(1.75, "chunk", "blue", 4, 36)
    timeline.add(2.0, "first_token", "blue", 1)
    timeline.add(3.0, "preempted", "blue", 9)
    timeline.add(3.25, "admitted", "blue", 49, 48)
    timeline.add(3.25, "chunk", "blue", 1, 48)
    timeline.add(3.5, "first_token", "blue", 10)
    timeline.add(4.0, "queued", "red", 12)  # it was moved
    timeline.add(4.5, "ended", "red", 12)
    return timeline


def test_events_are_noted_with_what_was_cached_and_what_was_computed() -> None:
    harness = Sharing()
    first, second = harness.run(PROMPT), harness.run(PROMPT)
    assert whole(first) == [("admitted", 30, 0), ("chunk", 16, 0), ("chunk", 14, 16), ("first_token", 1, 0)]
    assert whole(second) == [("admitted", 30, 28), ("chunk", 2, 28), ("first_token", 1, 0)]


def test_a_preemption_is_noted_and_what_comes_after_it() -> None:
    harness = Harness()
    request = harness.submit(1, PROMPT, 9, ignore_eos=True)
    while len(request.output) < 3:
        harness.step()
    assert request.slot is not None
    harness.group.occupancy.preempt(request.slot)
    harness.finish()
    events = whole(request)
    at = events.index(("preempted", 5, 0))  # two tokens were on their way
    assert events[at + 1 : at + 4] == [("admitted", 35, 32), ("chunk", 3, 32), ("first_token", 6, 0)]


def test_phases_follow_from_the_events() -> None:
    assert phases(preempted(), 1.0) == [
        Phase("queue", "blue", 1.0, 1.5, 0, 0, 0),
        Phase("prefill", "blue", 1.5, 2.0, 24, 16, 2),
        Phase("decode", "blue", 2.0, 3.0, 9, 0, 0),
        Phase("queue", "blue", 3.0, 3.25, 0, 0, 0),
        Phase("prefill", "blue", 3.25, 3.5, 1, 48, 1),
        Phase("decode", "blue", 3.5, 4.0, 3, 0, 0),
        Phase("queue", "red", 4.0, 4.5, 0, 0, 0),
    ]


def test_a_line_tells_seconds_since_the_arrival() -> None:
    line = text(preempted(), 1.0)
    assert line.startswith("0.0000 queued at blue; 0.5000 admitted at blue 40 after 16; 0.5000 chunk 20 after 16; ")
    assert line.endswith("; 3.5000 ended")


def test_a_timeline_is_bounded_and_keeps_both_ends() -> None:
    timeline = Timeline()
    for number in range(1_000):
        timeline.add(float(number), "chunk", "blue", 1, number)
    kept = [event.known for event in timeline]
    assert kept == [*range(FIRST_EVENTS), *range(1_000 - LAST_EVENTS, 1_000)]
    assert timeline.dropped == 1_000 - FIRST_EVENTS - LAST_EVENTS
    assert text(timeline, 0.0).endswith(f"({timeline.dropped} more between)")


def test_phases_never_end_before_they_began_whatever_comes_and_is_dropped() -> None:
    chance = Random(5)
    for _ in range(200):
        timeline, now = Timeline(), 0.0
        for _ in range(chance.randint(0, 200)):
            now += chance.random()
            timeline.add(now, chance.choice(["queued", "held", "admitted", "chunk", "first_token", "preempted"]), "blue", 1)
        timeline.add(now, "ended", "blue")
        found = phases(timeline, 0.0)
        assert all(phase.began_at <= phase.ended_at for phase in found)
        assert [phase.began_at for phase in found[1:]] == [phase.ended_at for phase in found[:-1]]
        assert found[-1].ended_at == now


def an_ended_request(number: int = 1) -> Request:
    request = make_request(number, [987654, 987655], 20, traceparent=f"00-{TRACE}-{CALLER}-01", cache_salt="a-secret", arrived_at=1.0)
    request.timeline = preempted()
    request.end = ENDED
    return request


def spans_of(history: History, exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_spans_have_the_callers_trace_and_the_phases_times() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    history = History(provider.get_tracer("test"))
    request = an_ended_request()
    request.timeline = Timeline()
    for event in list(preempted())[:-1]:
        request.timeline.add(*event)
    history.ended(request, "red", TIMES)
    spans = spans_of(history, exporter)
    assert {name: len(each) for name, each in spans.items()} == {
        "scheduler.queue": 3, "scheduler.prefill": 2, "scheduler.decode": 2, "scheduler.request": 1,
    }  # fmt: skip
    (root,) = spans["scheduler.request"]
    assert root.context is not None
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, CALLER)
    assert [event.name for event in root.events][:3] == ["queued", "admitted", "chunk"]
    for span in (*spans["scheduler.queue"], *spans["scheduler.decode"]):
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    lengths = {name: sum((span.end_time or 0) - (span.start_time or 0) for span in each) / 1e9 for name, each in spans.items()}
    assert lengths == pytest.approx({"scheduler.queue": 1.25, "scheduler.prefill": 0.75, "scheduler.decode": 1.5, "scheduler.request": 3.5})
    prefill = spans["scheduler.prefill"][0].attributes
    assert prefill is not None
    assert (prefill["lockstep.tokens"], prefill["lockstep.cached_tokens"], prefill["lockstep.chunks"]) == (24, 16, 2)


@pytest.mark.parametrize("log_requests", [False, True])
def test_the_way_of_a_request_is_logged_on_demand(log_requests: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        History(log_requests=log_requests).ended(an_ended_request(), "red", TIMES)
    records = [record for record in caplog.records if record.message == "the way of a request"]
    assert len(records) == log_requests
    assert all("preempted" in record.__dict__["timeline"] for record in records)


def test_what_is_remembered_and_shown_is_bounded_and_tells_no_text() -> None:
    history = History()
    for number in range(MAX_ENDED + 10):
        history.ended(an_ended_request(number), "red", TIMES)
    page = history.page((an_ended_request(number) for number in range(MAX_LISTED + 5)), 5.0)
    assert [each["request"] for each in page["ended"]] == [*range(MAX_ENDED + 9, 9, -1)]  # the last first
    assert (len(page["live"]), page["live_not_listed"]) == (MAX_LISTED, 5)
    shown = json.dumps(page)
    assert not any(told in shown for told in ("98765", "a-secret"))
    assert page["ended"][0]["events"][1] == {"at_s": 0.5, "what": "admitted", "group": "blue", "tokens": 40, "known": 16}


def test_groups_are_shown_with_their_slots() -> None:
    harness = Harness(Limits(slots=3, pages=41, page_size=4, max_length=64, max_step_tokens=16, vocab_size=50))
    for number in range(5):
        harness.submit(number, [1 + number] * 10, 20, ignore_eos=True)
    harness.step()
    (group,) = groups_page([harness.group])["groups"]
    assert json.loads(json.dumps(group)) == group
    assert (group["running"], group["waiting"], len(group["slots"])) == (3, 2, 3)
    assert {slot["request_id"] for slot in group["slots"]} == {"request-0", "request-1", "request-2"}
    assert {slot["state"] for slot in group["slots"]} <= {"prefill", "decode"}
    assert all(slot["confirmed"] <= slot["max_length"] == 30 for slot in group["slots"])
