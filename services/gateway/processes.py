"""Several processes of one gateway: they share the port, the limits of API keys, and one view of their metrics.

Each listens on the port itself (SO_REUSEPORT), and the kernel spreads the connections. This process serves nothing: it keeps the port,
starts the others, starts one again that has died, answers on the admin port for all, and passes a signal to stop on.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from services.gateway.limits import Limits, shared_memory
from services.gateway.merged_metrics import MergedRegistry
from services.gateway.server import LAST_WORDS_S, serve
from services.gateway.settings import GatewaySettings
from shared.admin import admin
from shared.errors import ConfigError, LockstepError
from shared.ports import port_of, reserve
from shared.process import write_ports
from shared.service import run_with

logger = logging.getLogger(__name__)

START_S = 60.0
RESTART_S = 1.0
POLL_S = 0.05
STOP_MARGIN_S = 5.0  # beyond the drain: then they are killed


@dataclass
class Child:
    """One of the processes."""

    number: int
    process: SpawnProcess
    ports_file: Path

    @property
    def ports(self) -> dict[str, int] | None:
        """None until it listens."""
        return json.loads(self.ports_file.read_text()) if self.ports_file.exists() else None


def run_child(settings: GatewaySettings, memory: Any, number: int) -> None:
    """The life of one process."""
    limits = Limits(memory, number)
    run_with("lockstep-gateway", settings, lambda settings, stop: serve(settings, stop, limits, shares_port=True))


async def serve_all(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serves with `settings.processes` processes until `stop` is set and all have drained. Raises LockstepError when they cannot start."""
    try:
        reservation = reserve(settings.host, settings.port)
    except OSError as error:
        raise LockstepError(f"port: cannot listen on {settings.host}:{settings.port}: {error}") from error
    with reservation, tempfile.TemporaryDirectory(prefix="lockstep-gateway-") as folder:
        await _Family(settings, port_of(reservation), Path(folder)).serve(stop)


class _Family:
    def __init__(self, settings: GatewaySettings, port: int, folder: Path) -> None:
        self._settings, self._port, self._folder = settings, port, folder
        self._context = multiprocessing.get_context("spawn")
        self._memory = shared_memory(self._context, settings.processes)
        self._children: dict[int, Child] = {}
        self._registry = MergedRegistry(settings.host)
        self._has_served = self._all_were_ready = self._is_stopping = False

    async def serve(self, stop: asyncio.Event) -> None:
        for number in range(self._settings.processes):
            self._start(number)
        keeping = [asyncio.create_task(self._keep(number)) for number in range(self._settings.processes)]
        stopping = asyncio.create_task(stop.wait())
        try:
            async with admin(self._settings, self._registry, self._readiness, self._liveness) as admin_port:
                await self._unless(self._until_all_listen(), stopping, *keeping)
                self._has_served = True
                if self._settings.ports_file is not None and not stop.is_set():
                    write_ports(self._settings.ports_file, {"http": self._port, "admin": admin_port})
                await self._unless(asyncio.Event().wait(), stopping, *keeping)
                self._is_stopping = True
                for child in self._children.values():
                    child.process.terminate()
                await self._until_all_have_ended()
        finally:
            self._is_stopping = True
            for task in (stopping, *keeping):
                task.cancel()
            for child in self._children.values():
                child.process.kill()
                child.process.join()

    def _start(self, number: int) -> None:
        ports_file = self._folder / f"{number}.json"
        ports_file.unlink(missing_ok=True)
        changes = {"port": self._port, "admin_port": 0, "ports_file": ports_file, "parent_pid": os.getpid()}
        arguments = (self._settings.model_copy(update=changes), self._memory, number)
        process = self._context.Process(target=run_child, args=arguments, name=f"gateway-{number}")
        process.start()
        self._children[number] = Child(number, process, ports_file)

    async def _keep(self, number: int) -> None:
        """Starts the process again whenever it has died. Raises LockstepError when it dies before all have listened, ConfigError when it
        cannot work with what it was given."""
        while True:
            child = self._children[number]
            await _ended(child.process)
            if self._is_stopping:
                return
            if child.process.exitcode == ConfigError.exit_status:  # no further start would change that
                raise ConfigError(f"process {number} of the gateway ended, see above")
            if not self._has_served:
                raise LockstepError(f"process {number} of the gateway ended at start with status {child.process.exitcode}, see above")
            logger.error("process %d of the gateway ended with status %s: starting it again", number, child.process.exitcode)
            self._registry.lost(number)
            await asyncio.sleep(RESTART_S)
            if self._is_stopping:
                return
            self._start(number)
            await self._until_all_listen()

    async def _until_all_listen(self) -> None:
        deadline = time.monotonic() + START_S
        while any(child.ports is None and child.process.is_alive() for child in self._children.values()):
            if time.monotonic() > deadline:
                raise LockstepError(f"the processes of the gateway did not listen within {START_S:g} s")
            await asyncio.sleep(POLL_S)
        for child in self._children.values():
            if child.ports is not None:
                self._registry.targets[child.number] = child.ports["admin"]

    async def _until_all_have_ended(self) -> None:
        ended = [asyncio.create_task(_ended(child.process)) for child in self._children.values()]
        patience_s = self._settings.drain_s + LAST_WORDS_S + STOP_MARGIN_S
        _, late = await asyncio.wait(ended, timeout=patience_s)
        if late:
            logger.warning("%d processes of the gateway did not stop within %g s: killing them", len(late), patience_s)

    async def _unless(self, work: Any, stopping: asyncio.Task[Any], *others: asyncio.Task[None]) -> None:
        """Until `work` is done, or there is a signal. Raises what ended one of the others."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait((task, stopping, *others), return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            task.cancel()

    def _readiness(self) -> str | None:
        """For the first time when all are, since the kernel asks nobody which of them a client gets; then while one of them is."""
        if self._is_stopping:
            return "stopping"
        reasons = [self._registry.ask(number, "/readyz") for number in range(self._settings.processes)]
        missing = next((reason for reason in reasons if reason), None)
        self._all_were_ready = self._all_were_ready or missing is None
        return None if self._all_were_ready and None in reasons else missing

    def _liveness(self) -> str | None:
        """All must be well: one that is stuck does not come back by itself, one that has died does."""
        reasons = [self._registry.ask(number, "/livez") for number, child in list(self._children.items()) if child.process.is_alive()]
        return next((reason for reason in reasons if reason), None)


async def _ended(process: SpawnProcess) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    sentinel = os.dup(process.sentinel)  # a descriptor can be watched only once
    loop.add_reader(sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sentinel)
        os.close(sentinel)
    process.join()
