"""Which workers the scheduler keeps streams to: those it was told of, and those that it discovers."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.scheduler.connection import Worker


@dataclass(frozen=True)
class Endpoint:
    """A pod of the workers' Service."""

    name: str  # by which a certificate may name it: pod.service
    terminating: bool


Endpoints = Mapping[str, Endpoint]  # by address, `host:port`


class Workers:
    """One task for each worker, which goes on while the worker is listed, whether or not it answers."""

    def __init__(self, make: Callable[[str, str | None], Worker]) -> None:
        """make: of an address and the name that its certificate must have, or None for the address's own host."""
        self._make = make
        self._running: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, target: str, name: str | None = None) -> None:
        worker = self._make(target, name)
        task = asyncio.create_task(worker.run())
        task.add_done_callback(self._ended)
        self._running[target] = worker, task

    def follow(self, endpoints: Endpoints) -> None:
        """Starts with who is new, takes no new requests to who is about to stop, lets go of who is gone."""
        for target in self._running.keys() - endpoints.keys():
            self._running.pop(target)[1].cancel()
        for target, endpoint in endpoints.items():
            if target not in self._running and not endpoint.terminating:
                self.add(target, endpoint.name)
            elif target in self._running and endpoint.terminating:
                self._running[target][0].leave()

    async def run(self) -> None:
        """Until cancelled. Raises what ended the task of a worker."""
        try:
            await self._broken
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
