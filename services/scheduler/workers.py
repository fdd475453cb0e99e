"""Which workers the scheduler keeps streams to: those it was told of, and those that it discovers."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from services.scheduler.connection import Worker


@dataclass(frozen=True)
class Endpoint:
    """A pod of the workers' Service."""

    name: str  # by which a certificate may name it: pod.service
    terminating: bool


Endpoints = Mapping[str, Endpoint]  # by address, `host:port`


class Workers:
    """One task for each worker, which goes on while the worker is listed, whether or not it answers.

    That a stream lives says more than a list does: who is not listed any more, and was not terminating, keeps those that it has, and gets
    no new ones.
    """

    def __init__(self, make: Callable[[str, str | None], Worker]) -> None:
        """make: of an address and the name that its certificate must have, or None for the address's own host."""
        self._make = make
        self._running: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        self._given: set[str] = set()  # whatever lists say
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, target: str) -> None:
        """One that is always there."""
        self._given.add(target)
        self._start(target, None)

    def follow(self, endpoints: Endpoints) -> None:
        """Starts with who is new, takes no new requests to who is about to stop."""
        for target in self._running.keys() - self._given:
            worker, task = self._running[target]
            endpoint = endpoints.get(target)
            worker.listed = endpoint is not None
            if endpoint is not None and endpoint.terminating:
                worker.leave()
            elif endpoint is not None and (worker.leaving or task.done()):  # another pod has got the address
                del self._running[target]
                task.cancel()
        for target, endpoint in endpoints.items():
            if target not in self._running and not endpoint.terminating:
                self._start(target, endpoint.name)

    async def run(self) -> None:
        """Until cancelled; `close` follows. Raises what ended the task of a worker."""
        await self._broken

    async def close(self) -> None:
        """Ends all streams."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, target: str, name: str | None) -> None:
        worker = self._make(target, name)
        task = asyncio.create_task(worker.run())
        task.add_done_callback(partial(self._ended, target))
        self._running[target] = worker, task

    def _ended(self, target: str, task: asyncio.Task[None]) -> None:
        if target in self._running and self._running[target][1] is task:
            del self._running[target]
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
