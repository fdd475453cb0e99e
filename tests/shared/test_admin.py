"""The admin port: what it answers, also while the event loop is stuck, and how it stands up to callers who do not behave."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text
from pydantic_settings import SettingsConfigDict

from shared.admin import MAX_CONNECTIONS, NO_PAGES, SOCKET_TIMEOUT_S, AdminServer, Heartbeat, Page, Probe, admin
from shared.errors import LockstepError
from shared.metrics import BatchHistogram, Twins, new_registry
from shared.settings import Settings, load

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;q=0.3"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4"


class ThingSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_THING_")


def well() -> None:
    return None


@contextlib.contextmanager
def serving(
    *live: Probe, ready: Probe = well, registry: CollectorRegistry | None = None, pages: Mapping[str, Page] = NO_PAGES
) -> Iterator[str]:
    server = AdminServer("127.0.0.1", 0, registry or CollectorRegistry(), live, (ready,), pages)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, timeout=5, headers=headers, trust_env=False, verify=False)


def test_probes_say_why_not() -> None:
    with serving(well, lambda: "plan 7 is overdue", lambda: "no tick", ready=lambda: "loading weights") as url:
        live, ready = get(f"{url}/livez"), get(f"{url}/readyz")
    assert (live.status_code, live.text) == (503, "plan 7 is overdue; no tick\n")
    assert (ready.status_code, ready.text) == (503, "plan 7 is overdue; no tick; loading weights\n")


def test_pages_are_json_made_at_each_call_and_a_broken_one_costs_one_answer() -> None:
    calls: list[int] = []

    def counted() -> object:
        calls.append(1)
        return {"calls": len(calls)}

    with serving(well, pages={"/debug/calls": counted, "/debug/broken": lambda: 1 / 0}) as url:
        assert [get(f"{url}/debug/calls").json() for _ in range(2)] == [{"calls": 1}, {"calls": 2}]
        assert get(f"{url}/debug/broken").status_code == 500
        missing = get(f"{url}/debug")
        assert (missing.status_code, missing.text) == (404, "/livez, /readyz, /metrics, /debug/calls, /debug/broken\n")


def test_probes_say_ok() -> None:
    with serving(well) as url:
        assert [get(url + path).status_code for path in ("/livez", "/readyz", "/metrics")] == [200, 200, 200]


def test_other_paths_and_methods_are_refused() -> None:
    with serving() as url:
        assert get(f"{url}/").status_code == 404
        assert httpx.post(f"{url}/livez", trust_env=False, verify=False).status_code == 405


async def test_a_stuck_event_loop_is_unready_before_it_is_dead() -> None:
    heartbeat = Heartbeat(new_registry("test"), stalled_s=60, unready_s=0.5)
    beating = asyncio.create_task(heartbeat.beat())
    with serving(heartbeat, ready=heartbeat.ready) as url:
        assert (await asyncio.to_thread(get, f"{url}/readyz")).status_code == 200
        deadline = time.monotonic() + 30
        while (answer := get(f"{url}/readyz")).status_code == 200:  # this blocks the event loop
            assert time.monotonic() < deadline
        assert "the event loop has not run for" in answer.text
        assert get(f"{url}/livez").status_code == 200
    beating.cancel()


def test_what_is_not_live_is_not_ready() -> None:
    with serving(lambda: "a step is overdue") as url:
        assert [(answer.status_code, answer.text) for answer in (get(f"{url}/livez"), get(f"{url}/readyz"))] == [
            (503, "a step is overdue\n")
        ] * 2


async def test_k8s_03_a_stuck_event_loop_is_seen_from_outside_and_a_live_one_too() -> None:
    heartbeat = Heartbeat(new_registry("test"), stalled_s=0.5)
    beating = asyncio.create_task(heartbeat.beat())
    with serving(heartbeat) as url:
        assert (await asyncio.to_thread(get, f"{url}/livez")).status_code == 200
        deadline = time.monotonic() + 30
        while (answer := get(f"{url}/livez")).status_code == 200:  # this blocks the event loop
            assert time.monotonic() < deadline
        assert "the event loop has not run for" in answer.text
        assert get(f"{url}/metrics").elapsed.total_seconds() < 1
        while (await asyncio.to_thread(get, f"{url}/livez")).status_code == 503:
            assert time.monotonic() < deadline
    beating.cancel()


@pytest.mark.parametrize("accept", ["application/openmetrics-text", PROMETHEUS_2, PROMETHEUS_3])
def test_both_formats_are_the_official_ones(accept: str) -> None:
    registry = new_registry("thing")
    Gauge("vllm:things", "Things.", registry=registry)
    counter = Counter("lockstep_things", "Things.", ["name"], registry=registry)
    counter.labels('a "b" \\ c\nd').inc(3)
    with serving(registry=registry) as url:
        plain, fancy = get(f"{url}/metrics"), get(f"{url}/metrics", Accept=accept)
    assert plain.headers["content-type"].startswith("text/plain")
    assert fancy.headers["content-type"].startswith("application/openmetrics-text")
    for families in (list(text(plain.text)), list(openmetrics(fancy.text))):
        samples = {sample.name: sample for family in families for sample in family.samples}
        assert samples["lockstep_things_total"].value == 3
        assert samples["lockstep_things_total"].labels == {"name": 'a "b" \\ c\nd'}
        assert samples["vllm:things"].value == 0
        assert samples["lockstep_build_info"].labels["service"] == "thing"
        assert samples["process_resident_memory_bytes"].value > 0
        assert not any(name.endswith("_created") for name in samples)


def test_a_caller_that_sends_nonsense_gets_an_error_and_others_their_answer() -> None:
    with serving() as url:
        assert get(f"{url}/metrics", Accept="text/plain; version=nonsense").status_code in (200, 500)
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1]))) as caller:
            caller.sendall(b"\x00\xff\r\n\r\n" * 10)
            assert b"400" in caller.recv(1000)
        assert get(f"{url}/livez").status_code == 200


def test_callers_that_open_and_say_nothing_do_not_keep_a_probe_out() -> None:
    with serving() as url, contextlib.ExitStack() as silent:
        before = threading.active_count()
        for _ in range(3 * MAX_CONNECTIONS):
            silent.enter_context(socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1]))))
        answer = get(f"{url}/livez")
        assert (answer.status_code, answer.elapsed.total_seconds() < SOCKET_TIMEOUT_S) == (200, True)  # it did not wait for them
        deadline = time.monotonic() + 30
        while threading.active_count() > before + MAX_CONNECTIONS:
            assert time.monotonic() < deadline


async def test_it_stops_cleanly_and_frees_its_port() -> None:
    async with admin(load(ThingSettings, "thing", []), CollectorRegistry(), well) as port:
        answer = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/readyz")
        assert answer.text == "ok\n"
    assert "admin" not in {thread.name for thread in threading.enumerate()}
    async with admin(load(ThingSettings, "thing", ["--admin-port", str(port)]), CollectorRegistry(), well) as again:
        assert again == port


def test_a_taken_port_is_named() -> None:
    with serving() as url, pytest.raises(LockstepError, match=r"admin_port: cannot listen on 127\.0\.0\.1:"):
        AdminServer("127.0.0.1", int(url.rsplit(":")[-1]), CollectorRegistry(), (), (well,))


def test_a_batch_histogram_counts_like_the_library_and_its_twin_is_the_same() -> None:
    registry = new_registry("thing")
    histogram = BatchHistogram("lockstep_gap_seconds", "Gaps.", ["engine"], [0.1, 1.0], registry)
    Twins("lockstep_", "vllm:", [histogram], frozenset({"gap_seconds"}), registry)
    child = histogram.labels("g")
    child.observe_all(np.array([0.05, 0.1, 0.5]))
    child.observe_all(np.array([]))
    child.observe(4.0, times=2)
    for prefix in ("lockstep_", "vllm:"):
        buckets = [registry.get_sample_value(f"{prefix}gap_seconds_bucket", {"engine": "g", "le": le}) for le in ("0.1", "1.0", "+Inf")]
        assert buckets == [2, 3, 5]
        assert registry.get_sample_value(f"{prefix}gap_seconds_count", {"engine": "g"}) == 5
        assert registry.get_sample_value(f"{prefix}gap_seconds_sum", {"engine": "g"}) == pytest.approx(8.65)
