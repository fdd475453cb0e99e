"""Lease and discovery by the real client library, over HTTP, against a small API server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health, health_pb2_grpc
from kubernetes.aio import client, config

from services.scheduler import discovery
from services.scheduler.kubernetes_api import in_words, kubernetes_api
from services.scheduler.kubernetes_lease import KubernetesLease
from services.scheduler.leadership import SteppedDown
from services.scheduler.workers import Endpoint, Endpoints
from shared.errors import ConfigError, PeerLost
from tests.api_server import ApiServer, api_server, endpoint_slice

NOBODY = "127.0.0.1:1"
DURATION_S, RENEWAL_S = 0.4, 0.1


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        yield server


@pytest.fixture
async def api(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[client.ApiClient]:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    async with kubernetes_api() as api:
        yield api


@pytest.fixture
async def alive() -> AsyncIterator[str]:
    """Address of a scheduler that answers."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def lease(api: client.ApiClient) -> Callable[..., KubernetesLease]:
    return lambda duration_s=DURATION_S: KubernetesLease(api, "models", "lockstep", duration_s, RENEWAL_S)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def written(server: ApiServer) -> tuple[str, str]:
    found = server.get("leases", "models", "lockstep")
    assert found is not None
    return found["metadata"]["annotations"]["lockstep/epoch"], found["metadata"]["annotations"]["lockstep/address"]


async def test_the_first_makes_the_lease_and_the_next_counts_on(
    server: ApiServer, lease: Callable[[], KubernetesLease], alive: str
) -> None:
    first = lease()
    assert await first.acquire(alive) == 1
    assert written(server) == ("1", alive)
    await first.release()
    assert await lease().acquire("127.0.0.1:2") == 2
    found = server.get("leases", "models", "lockstep")
    assert found is not None
    assert found["spec"]["holderIdentity"] == "127.0.0.1:2"
    assert found["spec"]["leaseTransitions"] == 3


async def test_a_holder_that_renews_keeps_it(lease: Callable[..., KubernetesLease]) -> None:
    duration_s = 1.0  # in which even a busy machine renews
    first = lease(duration_s)
    await first.acquire(NOBODY)
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(lease(duration_s).acquire("127.0.0.1:2"))
    done, _ = await asyncio.wait((holding, waiting), timeout=1.5 * duration_s)
    assert not done
    holding.cancel()
    assert await asyncio.wait_for(waiting, 30) == 2


async def test_a_holder_that_answers_keeps_it_though_it_cannot_renew(lease: Callable[[], KubernetesLease], alive: str) -> None:
    await lease().acquire(alive)
    waiting = asyncio.create_task(lease().acquire(NOBODY))
    done, _ = await asyncio.wait((waiting,), timeout=3 * DURATION_S)
    assert not done
    waiting.cancel()


async def test_of_many_that_wait_one_leads(server: ApiServer, lease: Callable[[], KubernetesLease]) -> None:
    await lease().acquire(NOBODY)
    leases = [lease() for _ in range(5)]
    waiting = [asyncio.create_task(each.acquire(f"127.0.0.1:{port}")) for port, each in enumerate(leases, 2)]
    epochs = await asyncio.wait_for(asyncio.gather(*waiting), 30)  # none renews, so each has its turn
    assert sorted(epochs) == [2, 3, 4, 5, 6]


async def test_who_sees_a_higher_epoch_steps_down(lease: Callable[[], KubernetesLease]) -> None:
    first, second = lease(), lease()
    await first.acquire(NOBODY)
    await second.acquire("127.0.0.1:2")
    with pytest.raises(SteppedDown, match=r"127\.0\.0\.1:2 leads now, with epoch 2; ours was 1"):
        await asyncio.wait_for(first.hold(), 30)
    with pytest.raises(SteppedDown):
        await first.raise_epoch(9)


async def test_without_the_api_server_the_leader_leads_on(server: ApiServer, lease: Callable[[], KubernetesLease]) -> None:
    first = lease()
    await first.acquire(NOBODY)
    holding = asyncio.create_task(first.hold())
    await server.close()
    with pytest.raises(PeerLost, match="epoch 5 cannot be taken without the API server"):  # whose it was may lead
        await first.raise_epoch(5)
    done, _ = await asyncio.wait((holding,), timeout=3 * RENEWAL_S)
    assert not done
    await server.open()
    await first.raise_epoch(5)
    assert written(server) == ("5", NOBODY)
    renewed = server.get("leases", "models", "lockstep")
    await until(lambda: server.get("leases", "models", "lockstep") != renewed)
    assert written(server) == ("5", NOBODY)
    holding.cancel()


async def test_a_write_whose_answer_is_lost_is_no_reason_to_step_down(
    server: ApiServer, lease: Callable[[], KubernetesLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, store = lease(), server._store

    async def store_and_say_nothing(*object_: Any) -> Any:
        await store(*object_)
        raise web.HTTPGatewayTimeout

    await first.acquire(NOBODY)
    holding = asyncio.create_task(first.hold())
    with monkeypatch.context() as patched:
        patched.setattr(server, "_store", store_and_say_nothing)
        with pytest.raises(PeerLost, match="epoch 5 cannot be taken"):
            await first.raise_epoch(5)
    assert written(server) == ("5", NOBODY)
    before = server.get("leases", "models", "lockstep")
    await until(lambda: holding.done() or server.get("leases", "models", "lockstep") != before)
    assert not holding.done()
    assert written(server) == ("5", NOBODY)
    await first.raise_epoch(6)
    holding.cancel()
    await asyncio.wait((holding,))
    await first.release()
    assert written(server) == ("6", "")


async def test_a_lease_is_given_up_though_a_renewal_comes_in_between(server: ApiServer, lease: Callable[[], KubernetesLease]) -> None:
    first = lease()
    await first.acquire(NOBODY)
    holding = [asyncio.create_task(first.hold()) for _ in range(3)]
    await until(lambda: sum("PUT" in request for request in server.requests) > 3)
    await first.release()
    for each in holding:
        each.cancel()
    await asyncio.wait(holding)
    assert await asyncio.wait_for(lease().acquire("127.0.0.1:2"), 30) == 2


async def test_who_waits_outlives_the_api_server(server: ApiServer, lease: Callable[[], KubernetesLease]) -> None:
    await server.close()
    waiting = asyncio.create_task(lease().acquire(NOBODY))
    done, _ = await asyncio.wait((waiting,), timeout=2 * RENEWAL_S)
    assert not done
    await server.open()
    assert await asyncio.wait_for(waiting, 30) == 1


@pytest.fixture
async def told(api: client.ApiClient, server: ApiServer) -> AsyncIterator[list[Endpoints]]:
    """All that `follow` tells of the Service `workers`."""
    told: list[Endpoints] = []
    task = asyncio.create_task(discovery.follow(api, "models", "workers", told.append))
    await until(lambda: told and server.watches)
    yield told
    task.cancel()
    await asyncio.wait((task,))


async def test_workers_come_end_and_go(server: ApiServer, told: list[Endpoints]) -> None:
    assert told == [{}]
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": False}, 7200))
    await until(lambda: len(told) == 2)
    assert told[-1] == {"10.0.0.1:7200": Endpoint("pod-0.workers", terminating=False)}
    await server.put("endpointslices", "models", endpoint_slice("others", {"10.0.0.9": False}, 7200))
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": True, "10.0.0.2": False}, 7200))
    await until(lambda: len(told) == 3)
    assert {address: each.terminating for address, each in told[-1].items()} == {"10.0.0.1:7200": True, "10.0.0.2:7200": False}
    await server.delete("endpointslices", "models", "workers-abc")
    await until(lambda: told[-1] == {})


async def test_a_pod_of_two_families_is_one_worker(server: ApiServer, told: list[Endpoints]) -> None:
    await server.put("endpointslices", "models", endpoint_slice("workers", {"fd00::1": False}, 7200, "workers-6", "IPv6"))
    await until(lambda: told[-1].keys() == {"[fd00::1]:7200"})
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": False}, 7200, "workers-4"))
    await until(lambda: told[-1].keys() == {"10.0.0.1:7200"})
    await server.delete("endpointslices", "models", "workers-4")
    await until(lambda: told[-1].keys() == {"[fd00::1]:7200"})


async def test_after_a_compaction_all_is_listed_anew(server: ApiServer, told: list[Endpoints]) -> None:
    await server.forget_events()
    await until(lambda: sum("endpointslices" in request for request in server.requests) >= 4)  # list, watch, list, watch
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": False}, 7200))
    await until(lambda: len(told) == 2)


async def test_what_a_watch_has_missed_the_next_list_tells(
    server: ApiServer, api: client.ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "RELIST_S", 1)
    told: list[Endpoints] = []
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": False}, 7200))
    following = asyncio.create_task(discovery.follow(api, "models", "workers", told.append))
    await until(lambda: told and server.watches)
    server.lose("endpointslices", "models", "workers-abc")
    await until(lambda: told[-1] == {})
    following.cancel()
    await asyncio.wait((following,))


async def test_what_is_known_holds_while_the_api_server_is_away(server: ApiServer, told: list[Endpoints]) -> None:
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": False}, 7200))
    await until(lambda: len(told) == 2)
    await server.close()
    await server.put("endpointslices", "models", endpoint_slice("workers", {"10.0.0.1": False, "10.0.0.2": False}, 7200))
    assert len(told) == 2
    await server.open()
    await until(lambda: len(told) == 3)
    assert told[-1].keys() == {"10.0.0.1:7200", "10.0.0.2:7200"}


async def test_in_a_cluster_no_proxy_stands_before_the_api_server(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{NOBODY}")
    address = f"http://127.0.0.1:{server.port}"
    monkeypatch.setattr(config, "load_incluster_config", lambda client_configuration: setattr(client_configuration, "host", address))
    async with kubernetes_api() as api:
        await client.DiscoveryV1Api(api).list_namespaced_endpoint_slice("models")


def test_a_refusal_is_told_with_what_the_api_server_says() -> None:
    message = 'endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:models:lockstep-scheduler" cannot list resource'
    error = client.ApiException(403, "Forbidden")
    error.headers = {"Audit-Id": "a" * 400}
    error.body = f'{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure",\n"message":{json.dumps(message)}}}'
    assert "cannot list resource" in in_words(error)
    assert "Audit-Id" not in in_words(error)
    assert in_words(TimeoutError()) == "TimeoutError"


async def test_without_a_cluster_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="no Kubernetes cluster"):
        async with kubernetes_api():
            pass
