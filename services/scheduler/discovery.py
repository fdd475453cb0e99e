"""Which workers there are, as the EndpointSlices of their Service tell: watched, and listed anew every RELIST_S, since watches miss things.

While the API server is away the last answer holds. That a worker is gone is seen on its stream, long before its slice says so.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from kubernetes.aio import client, watch

from services.scheduler.kubernetes_api import TIMEOUT_S, UNREACHABLE, in_words
from services.scheduler.workers import Endpoint, Endpoints
from shared.addresses import host_port

logger = logging.getLogger(__name__)

RELIST_S = 30
RETRY_S = 1.0  # also the least time of a round, however soon a watch ends
PORT = "grpc"  # its name in the Service
OF_SERVICE = "kubernetes.io/service-name"
EXPIRED = 410  # what a watch has seen last is too old to go on from: list anew


def endpoints(slices: Iterable[client.V1EndpointSlice], service: str) -> dict[str, Endpoint]:
    """Of all slices together. A pod that is in two of them, one being newer, is terminating if either says so.

    A Service of both families has each pod twice, under two addresses, and two streams to one group would take it from each other: IPv4
    counts then.
    """
    listed = [each for each in slices if each.endpoints]
    families = {each.address_type for each in listed}
    found: dict[str, Endpoint] = {}
    for each in listed:
        if each.address_type == "IPv6" and "IPv4" in families:
            continue
        port = next((port.port for port in each.ports or () if port.name == PORT), None)
        if port is None:
            continue
        for endpoint in each.endpoints or ():
            if not endpoint.addresses:
                continue
            host = endpoint.addresses[0]
            address = host_port(host, port)
            terminating = bool(endpoint.conditions and endpoint.conditions.terminating)
            before = found.get(address)
            found[address] = Endpoint(f"{endpoint.hostname or host}.{service}", terminating or bool(before and before.terminating))
    return found


async def follow(api: client.ApiClient, namespace: str, service: str, on_change: Callable[[Endpoints], None]) -> None:
    """Calls `on_change` with all endpoints whenever they differ from before. Until cancelled."""
    discovery = client.DiscoveryV1Api(api)
    selector = f"{OF_SERVICE}={service}"
    told: Endpoints | None = None
    away = False

    def tell(slices: Mapping[str, client.V1EndpointSlice]) -> None:
        nonlocal told
        now = endpoints(slices.values(), service)
        if now != told:
            told = now
            on_change(now)

    while True:
        began = time.monotonic()
        try:
            listed = await discovery.list_namespaced_endpoint_slice(namespace, label_selector=selector, _request_timeout=TIMEOUT_S)
            if away:
                logger.info("the API server answers again")
                away = False
            slices = {_name(each): each for each in listed.items}
            tell(slices)
            async with watch.Watch() as watching:
                events = watching.stream(
                    discovery.list_namespaced_endpoint_slice,
                    namespace,
                    label_selector=selector,
                    resource_version=listed.metadata.resource_version if listed.metadata else None,
                    allow_watch_bookmarks=True,
                    timeout_seconds=RELIST_S,
                    _request_timeout=RELIST_S + TIMEOUT_S,
                )
                async for event in events:
                    if not isinstance(event, dict):  # the library hands on what is no JSON
                        raise ValueError(f"not an event of a watch: {str(event)[:100]}")
                    if event["type"] == "DELETED":
                        slices.pop(_name(event["object"]), None)
                    elif event["type"] in ("ADDED", "MODIFIED"):
                        slices[_name(event["object"])] = event["object"]
                    tell(slices)
        except UNREACHABLE as error:
            gone = isinstance(error, client.ApiException) and error.status == EXPIRED
            if not gone and not away:
                logger.warning("the API server cannot be asked for the workers, those known stay: %s", in_words(error))
                away = True
        await asyncio.sleep(began + RETRY_S - time.monotonic())


def _name(each: client.V1EndpointSlice) -> str:
    return (each.metadata.name or "") if each.metadata is not None else ""
