"""`lockstep serve`: worker, scheduler and gateway as child processes on this machine, from the first to the last of them.

A service that ends by itself is started again on its port, and requests go on where they were: the launcher says which it was and why. One
that ends too often, or over a setting, ends the others, too.
"""

import asyncio
import ipaddress
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from rich.console import Console

from services.local.child import Child, environment
from services.local.loading import POLL_EVERY_S, POLL_TIMEOUT_S, until_loaded
from services.local.progress import StartupProgress
from shared.addresses import LOOPBACK, host_port, reachable
from shared.errors import ConfigError, LockstepError
from shared.ports import port_of, reserve

logger = logging.getLogger(__name__)
T = TypeVar("T")

DRAIN_S = 5.0  # for running answers, after a signal
STOP_S = DRAIN_S + 3.0  # a service that has not stopped by then is killed
GROUP_WAIT_S = 120.0  # a worker that is started again loads its model first
MOST_ENDS, WITHIN_S = 3, 60.0  # of one service, that are mended


class Stopped(LockstepError):
    """Somebody asked us to stop: SIGINT or SIGTERM."""


class ChildEnded(LockstepError):
    """A service ended by itself: over a setting, then so does the launcher, or for another reason."""

    def __init__(self, message: str, child: Child) -> None:
        super().__init__(message)
        self.child = child
        if child.ended.result() == ConfigError.exit_status:
            self.exit_status = ConfigError.exit_status


@dataclass(frozen=True)
class Options:
    """What the user asked for; `worker` are arguments passed on to it as they are."""

    model: Path | None  # None: the demo model
    served_model_names: tuple[str, ...]  # empty: the folder's name
    host: str
    port: int
    log_level: str
    worker: tuple[str, ...] = ()
    api_keys: Path | None = None  # the gateway's file of them
    standby: bool = False  # a second scheduler, which takes over when the first is gone


class Launcher:
    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console = options, console
        self.forward_from = logging.DEBUG if options.log_level == "debug" else logging.WARNING
        self.admin_ports: dict[str, int] = {}
        self.children: list[Child] = []  # in the order of their first start; stopped in the opposite one
        self._ends: dict[Child, list[float]] = {}  # when each ended by itself, lately
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    async def run(self) -> None:
        """Serves until a signal. Raises ConfigError at start, ChildEnded when a service ends then, or too often later."""
        options = self.options
        if options.api_keys is None and not is_loopback(options.host):
            raise ConfigError(
                f"--host {options.host} lets whoever reaches it use it: name a file of API keys with --api-keys; "
                "'lockstep key NAME --file FILE' makes one"
            )
        with reserved(options.host, options.port) as reservation:
            await self._serve(port_of(reservation))

    async def _serve(self, port: int) -> None:
        options = self.options
        folder = Path(".lockstep").absolute()
        run_file = folder / f"run-{port}.json"
        run_file.unlink(missing_ok=True)  # of a launcher that was killed: the port is free
        self.logs, self.lease = folder / f"logs-{port}", folder / f"lease-{port}"
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            model = options.model or await self._demo_model()
            names = options.served_model_names or (model.name,)
            url = f"http://{host_port(reachable(options.host), port)}"
            with StartupProgress(self.console) as progress:
                ports = await self._start(model, names, port, progress)
                await self._unless_over(until_loaded(host_port(LOOPBACK, ports["worker"]), progress))
                progress.show("waiting for the gateway")
                await self._unless_over(until_healthy(url))
                self.children[-1].forward_from = self.forward_from
            self._write(run_file, model, names, ports, url)
            self._tell(names, url)
            await self._keep(lambda: self._write(run_file, model, names, ports, url))
        except Stopped:
            logger.info("stopping")
        finally:
            for child in self.children:
                self._hush(child)
            for child in reversed(self.children):
                await child.stop(STOP_S, self.hurry)
            run_file.unlink(missing_ok=True)

    async def _start(self, model: Path, names: tuple[str, ...], port: int, progress: StartupProgress) -> dict[str, int]:
        """Starts the three; returns their ports. Each needs the address of the one before."""
        ports = {"worker": await self._start_child("worker", LOOPBACK, ["--model", str(model), *self.options.worker], progress)}
        scheduler = [
            "--worker",
            host_port(LOOPBACK, ports["worker"]),
            "--group-wait-s",
            f"{GROUP_WAIT_S:g}",
            f"--served-model-name={names[0]}",
        ]
        schedulers = ["scheduler"]
        if self.options.standby:
            shutil.rmtree(self.lease, ignore_errors=True)  # of a launcher that was killed
            scheduler += ["--leadership", f"file:{self.lease}"]
            schedulers.append("scheduler-1")
        for name in schedulers:
            ports[name] = await self._start_child(name, LOOPBACK, scheduler, progress)
        gateway = [f"--scheduler={host_port(LOOPBACK, ports[name])}" for name in schedulers]
        gateway += ["--drain-s", f"{DRAIN_S:g}", *(f"--served-model-name={name}" for name in names)]
        gateway += [f"--api-keys={self.options.api_keys}"] if self.options.api_keys is not None else []
        ports["gateway"] = await self._start_child("gateway", self.options.host, gateway, progress, port)
        return ports

    async def _start_child(self, name: str, host: str, arguments: list[str], progress: StartupProgress, port: int = 0) -> int:
        progress.show(f"starting the {name}")
        child = Child(name, host, ["--log-level", self.options.log_level, *arguments], self.logs, self.forward_from, port=port)
        if name == "gateway":
            self._hush(child)  # until it is healthy
        await child.start()
        self.children.append(child)
        ports = await self._unless_over(child.ports())
        self.admin_ports[name] = ports["admin"]
        return ports["http" if name == "gateway" else "grpc"]

    async def _keep(self, on_change: Callable[[], None]) -> None:
        """Until a signal: starts again what ends. on_change: called then. Raises ChildEnded when one ends too often, or over a setting."""
        broken: Child | None = None
        while True:
            try:
                if broken is not None:
                    await broken.start_again()
                    for child in self.children:  # another may have ended meanwhile
                        self.admin_ports[child.name] = (await self._unless_over(child.ports()))["admin"]
                    on_change()
                await self._unless_over(asyncio.Event().wait())
            except ChildEnded as error:
                broken = error.child
                if error.exit_status == ConfigError.exit_status or self._too_often(broken):
                    raise
                logger.warning("%s; starting it again", error)

    def _too_often(self, child: Child) -> bool:
        now = time.monotonic()
        ends = self._ends[child] = [*(end for end in self._ends.get(child, []) if now - end < WITHIN_S), now]
        return len(ends) > MOST_ENDS

    def _hush(self, child: Child) -> None:
        """That another service is not there is no news while we start or stop them: such warnings go to its log alone."""
        if self.forward_from > logging.DEBUG:
            child.forward_from = logging.ERROR

    async def _unless_over(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises Stopped after a signal and ChildEnded when a service ends first."""
        task, stopping = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((task, stopping, *(child.ended for child in self.children)), return_when=asyncio.FIRST_COMPLETED)
            if self.stop.is_set():
                raise Stopped
            for child in self.children:
                if child.ended.done():
                    raise ChildEnded(child.end_in_words(await child.last_words()), child)
            return await task
        finally:
            task.cancel()
            stopping.cancel()

    async def _demo_model(self) -> Path:
        """The folder of the demo model, fetched by a process of its own, whose bars go to our terminal."""
        command = (sys.executable, "-m", "services.worker.weights.demo")
        fetching = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment(), start_new_session=True)
        try:
            output, _ = await self._unless_over(fetching.communicate())
        except Stopped:
            os.killpg(fetching.pid, signal.SIGTERM)  # pip too
            await fetching.wait()
            raise
        if fetching.returncode:
            raise LockstepError("the demo model could not be had, see above; or give a model folder: lockstep serve MODEL")
        return Path(output.decode().splitlines()[-1])

    def _write(self, run_file: Path, model: Path, names: tuple[str, ...], ports: dict[str, int], url: str) -> None:
        """Tells other commands where all is."""
        content = {
            "url": url,
            "model": str(model),
            "served_model_names": names,
            "ports": ports,
            "admin_ports": self.admin_ports,
            "pids": {"launcher": os.getpid()} | {child.name: child.process.pid for child in self.children},
            "logs": str(self.logs),
        }
        temporary = run_file.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(run_file)  # in one step: a reader sees the whole file or none

    def _tell(self, names: tuple[str, ...], url: str) -> None:
        """Tells the user that all is ready."""
        question = {"role": "user", "content": "What is the capital of France?"}
        body = json.dumps({"model": names[0], "temperature": 0, "messages": [question]})
        key = " -H 'Authorization: Bearer KEY'" if self.options.api_keys is not None else ""
        self.console.print(
            f"Lockstep is ready: {names[0]} at {url}/v1, logs in {self.logs}. Ctrl-C stops it. Open {url}/ or try\n\n"
            f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
        )


async def until_healthy(url: str) -> None:
    """Returns once the gateway can serve."""
    async with httpx.AsyncClient(timeout=POLL_TIMEOUT_S, trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"{url}/health")).is_success:
                    return
            except httpx.TransportError as error:
                logger.debug("gateway: %s", error)
            await asyncio.sleep(POLL_EVERY_S)


def reserved(host: str, port: int) -> socket.socket:
    """Keeps the port, or one that the kernel picks for 0. Raises ConfigError when nobody could listen there now."""
    try:
        return reserve(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host_port(host, port)}: {error.strerror}; choose with --host and --port") from error


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
