"""The scheduler's pages for people on its admin port, and its spans at a collector, over real gRPC and HTTP."""

import asyncio
import time
from pathlib import Path

from tests.otlp import attributes, collecting
from tests.services.scheduler.scripted_worker import ScriptedWorker, serving
from tests.services.scheduler.session_client import session, submit
from tests.services.scheduler.test_service import debug_page, scheduling

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = [*range(1, 31)]


async def test_requests_and_groups_are_shown_while_they_run_and_after(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        client.submit(submit(1, PROMPT, 20, ignore_eos=True, request_id="first"))
        await client.ended(1)
        worker.running.clear()
        client.submit(submit(2, PROMPT, 20, ignore_eos=True, request_id="second", cache_salt=""))
        async with asyncio.timeout(30):
            while not (requests := await debug_page(tmp_path, "requests"))["live"]:
                await asyncio.sleep(0.01)
        (live,), (ended,) = requests["live"], requests["ended"]
        assert (live["request_id"], live["end"], live["cached_tokens"]) == ("second", None, 28)
        assert (ended["request_id"], ended["end"], ended["completion_tokens"]) == ("first", "length", 20)
        assert [event["what"] for event in ended["events"]] == ["queued", "admitted", "chunk", "first_token", "ended"]
        assert ended["events"][2] | {"at_s": 0} == {"at_s": 0, "what": "chunk", "group": "group-0", "tokens": 30, "known": 0}
        (group,) = (await debug_page(tmp_path, "groups"))["groups"]
        assert (group["name"], group["running"], group["ready"]) == ("group-0", 1, True)
        assert ended["arrived_at_s"] <= group["last_result"]["made_at_s"] < group["last_result"]["result_at_s"] <= time.monotonic()
        assert [slot["request_id"] for slot in group["slots"]] == ["second"]
        worker.running.set()
        await client.ended(2)
        assert not (await debug_page(tmp_path, "requests"))["live"]


async def test_spans_of_a_request_go_to_the_collector_under_its_gateways_trace(tmp_path: Path) -> None:
    with collecting() as collector:
        async with (
            serving(ScriptedWorker()) as worker,
            scheduling(tmp_path, worker, trace_endpoint=collector.endpoint) as target,
            session(target) as client,
        ):
            client.submit(submit(1, PROMPT, 20, ignore_eos=True, request_id="traced", traceparent=f"00-{TRACE}-{CALLER}-01"))
            client.submit(submit(2, PROMPT, 20, traceparent=f"00-{TRACE}-{CALLER}-00"))  # whose caller does not record
            client.submit(submit(3, PROMPT, 20, traceparent="\u00e4 none"))
            for request in (1, 2, 3):
                await client.ended(request)
        (root,) = (span for span in collector.named("scheduler.request") if span.trace_id.hex() == TRACE)
        assert root.parent_span_id.hex() == CALLER
        told = attributes(root)
        assert (told["lockstep.request_id"], told["lockstep.end"], told["lockstep.completion_tokens"]) == ("traced", "length", 20)
        parts = [span for _, span in collector.spans if span.parent_span_id == root.span_id]
        assert [span.name for span in parts] == ["scheduler.queue", "scheduler.prefill", "scheduler.decode"]
        assert root.start_time_unix_nano == parts[0].start_time_unix_nano
        assert root.end_time_unix_nano == parts[-1].end_time_unix_nano
        assert {service for service, _ in collector.spans} == {"lockstep-scheduler"}
        assert len(collector.named("scheduler.request")) == 2
