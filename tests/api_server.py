"""A small Kubernetes API server: objects with resource versions, lists, watches with bookmarks, 409 on stale writes, 410 on old versions.

What it does not know, it answers 404, as a real one would a kind that is not installed.
"""

import asyncio
import json
import socket
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from aiohttp import web

from shared.ports import port_of, reserve

Object = dict[str, Any]
T = TypeVar("T")
KEPT_EVENTS = 50  # older ones are compacted: who wants to go on from there is told 410
KINDS = {"leases": "Lease", "endpointslices": "EndpointSlice", "pods": "Pod"}


@dataclass(frozen=True)
class Event:
    version: int
    type: str
    resource: str
    namespace: str
    object: Object


class ApiServer:
    """Holds the objects. A test may also change them from within: `put`, `delete`; `close` and `open` make it go away and come back, at the
    same port, which nobody else gets until its `end`."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._version = 100
        self._changed = asyncio.Condition()
        self.watches = 0  # that are open
        self.requests: list[str] = []
        self._runner: web.AppRunner | None = None
        self._reservation: socket.socket | None = None

    @property
    def port(self) -> int:
        if self._reservation is None:
            self._reservation = reserve("127.0.0.1")
        return port_of(self._reservation)

    async def open(self) -> None:
        app = web.Application()
        for root in ("/api/{version}", "/apis/{group}/{version}"):
            collection = root + "/namespaces/{namespace}/{resource}"
            app.router.add_get(collection, self._list)
            app.router.add_post(collection, self._create)
            app.router.add_get(collection + "/{name}", self._read)
            app.router.add_put(collection + "/{name}", self._replace)
            app.router.add_patch(collection + "/{name}", self._patch)
            app.router.add_delete(collection + "/{name}", self._remove)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def end(self) -> None:
        await self.close()
        if self._reservation is not None:
            self._reservation.close()

    def kubeconfig(self, folder: Path) -> Path:
        """A file for KUBECONFIG."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    # From within

    async def put(self, resource: str, namespace: str, object: Object) -> Object:
        """Creates or replaces, whatever the version."""
        key = resource, namespace, object["metadata"]["name"]
        return await self._store(key, object, "MODIFIED" if key in self._objects else "ADDED")

    async def delete(self, resource: str, namespace: str, name: str) -> None:
        await self._store((resource, namespace, name), self._objects[resource, namespace, name], "DELETED")

    def get(self, resource: str, namespace: str, name: str) -> Object | None:
        return deepcopy(self._objects.get((resource, namespace, name)))

    def lose(self, resource: str, namespace: str, name: str) -> None:
        """Deletes, and no watch is told."""
        del self._objects[resource, namespace, name]

    async def forget_events(self) -> None:
        """As after a compaction: who watches from before is told 410."""
        self._events.clear()
        self._version += KEPT_EVENTS
        async with self._changed:
            self._changed.notify_all()

    async def _store(self, key: tuple[str, str, str], object: Object, type: str) -> Object:
        self._version += 1
        resource, namespace, _ = key
        stored = deepcopy(object)
        before = self._objects.get(key)
        stored["metadata"] |= {
            "namespace": namespace,
            "resourceVersion": str(self._version),
            "uid": before["metadata"]["uid"] if before else str(uuid.uuid4()),
        }
        if type == "DELETED":
            del self._objects[key]
        else:
            self._objects[key] = stored
        self._events.append(Event(self._version, type, resource, namespace, stored))
        async with self._changed:
            self._changed.notify_all()
        return stored

    # Over HTTP

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._count(request)
        resource, namespace = request.match_info["resource"], request.match_info["namespace"]
        if resource not in KINDS:
            return _status(404, "NotFound", f"no kind {resource}")
        selector = dict(part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part)
        if request.query.get("watch") in ("true", "True", "1"):
            return await self._watch(request, resource, namespace, selector)
        items = [
            each for (kind, space, _), each in self._objects.items() if (kind, space) == (resource, namespace) and _selected(each, selector)
        ]
        group = request.match_info.get("group")
        version = f"{group}/{request.match_info['version']}" if group else request.match_info["version"]
        return web.json_response(
            {"apiVersion": version, "kind": f"{KINDS[resource]}List", "metadata": {"resourceVersion": str(self._version)}, "items": items}
        )

    async def _watch(self, request: web.Request, resource: str, namespace: str, selector: Mapping[str, str]) -> web.StreamResponse:
        at = int(request.query.get("resourceVersion") or self._version)
        ends = asyncio.get_running_loop().time() + float(request.query.get("timeoutSeconds", 300))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def write(type: str, object: Object) -> None:
            await response.write(json.dumps({"type": type, "object": object}).encode() + b"\n")

        self.watches += 1
        try:
            while True:
                if (self._events and at < self._events[0].version - 1) or (not self._events and at < self._version):
                    await write("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"})
                    return response
                for event in [event for event in self._events if event.version > at]:
                    at = event.version
                    if (event.resource, event.namespace) == (resource, namespace) and _selected(event.object, selector):
                        await write(event.type, event.object)
                if request.query.get("allowWatchBookmarks"):
                    await write("BOOKMARK", {"kind": KINDS[resource], "metadata": {"resourceVersion": str(at)}})
                try:
                    async with asyncio.timeout_at(ends), self._changed:
                        await self._changed.wait_for(partial(self._newer_than, at))
                except TimeoutError:
                    return response
        except ConnectionResetError:  # nobody watches any more
            return response
        finally:
            self.watches -= 1

    def _newer_than(self, version: int) -> bool:
        return self._version > version

    async def _create(self, request: web.Request) -> web.Response:
        self._count(request)
        body = await request.json()
        key = request.match_info["resource"], request.match_info["namespace"], body["metadata"]["name"]
        if key in self._objects:
            return _status(409, "AlreadyExists", f"{key[2]} exists")
        return web.json_response(await self._store(key, body, "ADDED"), status=201)

    async def _read(self, request: web.Request) -> web.Response:
        self._count(request)
        found = self._objects.get(_key(request))
        return web.json_response(found) if found else _status(404, "NotFound", f"{_key(request)[2]} not found")

    async def _replace(self, request: web.Request) -> web.Response:
        self._count(request)
        body, before = await request.json(), self._objects.get(_key(request))
        if before is None:
            return _status(404, "NotFound", "not found")
        if body["metadata"].get("resourceVersion") not in (None, before["metadata"]["resourceVersion"]):
            return _status(409, "Conflict", "the object has been modified")
        return web.json_response(await self._store(_key(request), body, "MODIFIED"))

    async def _patch(self, request: web.Request) -> web.Response:
        self._count(request)
        before = self._objects.get(_key(request))
        if before is None:
            return _status(404, "NotFound", "not found")
        return web.json_response(await self._store(_key(request), _merged(before, await request.json()), "MODIFIED"))

    async def _remove(self, request: web.Request) -> web.Response:
        self._count(request)
        if _key(request) not in self._objects:
            return _status(404, "NotFound", "not found")
        await self.delete(*_key(request))
        return web.json_response({"kind": "Status", "status": "Success"})

    def _count(self, request: web.Request) -> None:
        self.requests.append(f"{request.method} {request.path}")


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.open()
    try:
        yield server
    finally:
        await server.end()


class Cluster:
    """An API server that runs beside a test which does not await."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self.server.open())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.server.end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)


def endpoint_slice(service: str, endpoints: Mapping[str, bool], port: int, name: str | None = None, family: str = "IPv4") -> Object:
    """A slice of a Service; endpoints: host -> whether it is terminating."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name or f"{service}-abc", "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {"ready": not terminating, "serving": True, "terminating": terminating},
                "hostname": f"pod-{number}",
            }
            for number, (host, terminating) in enumerate(endpoints.items())
        ],
    }


def _key(request: web.Request) -> tuple[str, str, str]:
    return request.match_info["resource"], request.match_info["namespace"], request.match_info["name"]


def _selected(object: Object, selector: Mapping[str, str]) -> bool:
    labels: dict[str, str] = object["metadata"].get("labels", {})
    return selector.items() <= labels.items()


def _merged(before: Object, patch: Object) -> Object:
    result = deepcopy(before)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}, status=code)
