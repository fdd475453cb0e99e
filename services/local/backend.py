"""Workers and their scheduler as processes on this machine, for a client that needs no gateway."""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.local.child import Child
from services.local.loading import until_loaded
from services.local.progress import StartupProgress
from shared.addresses import LOOPBACK
from shared.errors import ConfigError, LockstepError
from shared.protocol import execution_pb2 as pb

logger = logging.getLogger(__name__)
T = TypeVar("T")

CAUSE_S = 0.25  # for the end of a service to be noticed by us, after what it did to others
STOP_S = 8.0  # a service that has not stopped by then is killed
# The client holds back by itself, and nobody streams: a step takes what the worker allows.
SCHEDULER = ("--max-waiting-requests", "1000000", "--max-waiting-tokens", "1000000000000", "--max-step-tokens", "32768")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class ServiceEnded(LockstepError):
    """A worker or the scheduler ended by itself: nothing can be computed any more."""


class Backend:
    """One worker for each group and a scheduler. All methods run on one event loop; `stop` is due also when `start` failed."""

    def __init__(self, model: Path, groups: int, ranks: int, worker: Sequence[str], logs: Path | None = None) -> None:
        """ranks: of one group; worker: arguments of each worker, passed on as they are; logs: where logs stay, None: they go with the
        processes, unless one of them broke. Raises ConfigError for too few GPUs."""
        devices = _devices(groups, ranks, os.environ)
        self._keeps_logs = logs is not None
        self.logs = logs or Path(tempfile.mkdtemp(prefix="lockstep-offline-"))
        self.logs.mkdir(parents=True, exist_ok=True)
        self.admin_ports: dict[str, int] = {}  # by service: `scheduler`, and `worker` or with several groups `worker-0` ...
        self.groups: list[pb.WorkerGroup] = []  # as their workers describe them, once they are ready
        self._children: list[Child] = []
        self._broken = self._stopping = False
        names = ["worker"] if groups == 1 else [f"worker-{number}" for number in range(groups)]
        common = ("--model", str(model.absolute()), *worker)
        self._workers = [
            Child(name, LOOPBACK, ["--group", f"group-{number}", *common], self.logs, logging.WARNING, variables)
            for number, (name, variables) in enumerate(zip(names, devices, strict=True))
        ]

    async def start(self, progress: StartupProgress) -> int:
        """Returns the port of the scheduler once it has every group. Raises ServiceEnded, or ConfigError for a setting that is none."""
        ports = []
        for worker in self._workers:
            progress.show(f"starting the {worker.name}")
            ports.append(await self._start(worker))
        addresses = [f"{LOOPBACK}:{port}" for port in ports]
        progress.show("starting the scheduler")
        own = (*SCHEDULER, *_quiet(os.environ), *(f"--worker={address}" for address in addresses))
        # At first it warns of workers that are not ready yet.
        scheduler = await self._start(Child("scheduler", LOOPBACK, own, self.logs, forward_from=logging.ERROR))
        for worker, address in zip(self._workers, addresses, strict=True):
            self.groups.append(await self.unless_ended(until_loaded(address, progress, f"{worker.name}: ", _is_taken)))
        self._children[-1].forward_from = logging.WARNING
        return scheduler

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises. Raises ServiceEnded instead when a service ends, or has ended."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, *(child.ended for child in self._children)), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None:
                ends = [child.ended for child in self._children]  # one of which may be why
                await asyncio.wait(ends, timeout=CAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            for child in self._children:
                if child.ended.done():
                    await self._raise_end_of(child)
            return await task
        finally:
            task.cancel()

    async def stop(self) -> None:
        """Ends all; their logs go too, unless they are kept or one of them broke."""
        self._stopping = True
        for child in self._children:
            child.forward_from = logging.ERROR  # that others are gone is no news now
        for child in reversed(self._children):
            await child.stop(STOP_S, asyncio.Event())
        if not self._keeps_logs and not self._broken:
            shutil.rmtree(self.logs)

    async def _start(self, child: Child) -> int:
        await child.start()
        self._children.append(child)
        ports = await self.unless_ended(child.ports())
        self.admin_ports[child.name] = ports["admin"]
        return ports["grpc"]

    async def _raise_end_of(self, child: Child) -> None:
        if self._stopping:
            raise ServiceEnded("closed, while something was still to be computed")
        await child.last_words()
        if child.ended.result() == ConfigError.exit_status:  # what does not fit is told in one line
            raise ConfigError(f"the {child.name}: {child.last_line}")
        self._broken = True
        raise ServiceEnded(child.end_in_words(child.last_line))


def _is_taken(group: pb.WorkerGroup) -> bool:
    """It is ready, and a scheduler has a stream to it."""
    return group.ready and group.highest_stream > 0


def _quiet(environment: Mapping[str, str]) -> Sequence[str]:
    """No line in the log for each prompt, unless somebody asks for it."""
    return () if "LOCKSTEP_SCHEDULER_LOG_LEVEL" in environment else ("--log-level", "warning")


def _devices(groups: int, ranks: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """What each group's worker sees of the GPUs, as environment variables: groups share none. Nothing where there are none."""
    listed = environment.get(VISIBLE)
    gpus = listed.split(",") if listed is not None else [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if groups == 1 or not gpus or gpus == [""]:
        return [{} for _ in range(groups)]
    if len(gpus) < groups * ranks:
        raise ConfigError(f"groups: {groups} of {ranks} ranks need {groups * ranks} GPUs, there are {len(gpus)}: {VISIBLE}={listed}")
    return [{VISIBLE: ",".join(gpus[number * ranks : (number + 1) * ranks])} for number in range(groups)]
