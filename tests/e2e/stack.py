"""The three services as real processes, each of which a test may kill: their ports stay theirs."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from shared.ports import port_of, reserve
from tests.processes import Family, eventually

START_S = 100.0  # the demo model on a busy machine
STOP_S = 10.0
LEADS_S = 20.0
CLIENT_TIMEOUT_S = 60.0
# httpx loads the system's certificates for each client, 40 ms long, unless told not to verify any: here all is plain HTTP.


class Service:
    """`python -m services.NAME`, with its output in a file; one of several of a name has its number behind it."""

    def __init__(self, name: str, folder: Path, family: Family, arguments: Sequence[str], number: int = 0) -> None:
        self.name = name
        label = f"{name}-{number}" if number else name
        self.log_file, self._ports_file = folder / f"{label}.log", folder / f"{label}-ports.json"
        self._family, self._arguments = family, arguments
        self._reservations = {option: reserve("127.0.0.1") for option in ("--port", "--admin-port")}
        self._start()

    def _start(self) -> None:
        own = {option: port_of(reservation) for option, reservation in self._reservations.items()} | {"--parent-pid": os.getpid()}
        self._ports_file.unlink(missing_ok=True)
        with self.log_file.open("a") as log:
            common = [f"{name}={value}" for name, value in own.items()]
            command = [sys.executable, "-m", f"services.{self.name}", *common, "--ports-file", str(self._ports_file), *self._arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._family.environment)
        eventually(lambda: self._ports_file.exists() or self.ended, START_S)
        assert not self.ended, f"the {self.name} ended at start with status {self.process.returncode}:\n{self.log}"

    def start_again(self) -> None:
        """On the same ports, after it has ended; returns when it listens."""
        assert self.ended
        self._start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def ports(self) -> dict[str, int]:
        """`grpc` or `http`, and `admin`."""
        return {name: int(port) for name, port in json.loads(self._ports_file.read_text()).items()}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['http' if self.name == 'gateway' else 'grpc']}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def kill(self) -> None:
        """SIGKILL: no drain, no goodbye."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.terminate()

    def release_ports(self) -> None:
        for reservation in self._reservations.values():
            reservation.close()

    @property
    def ready(self) -> bool:
        """What its admin port says, if it answers."""
        try:
            return not self.ended and httpx.get(f"http://127.0.0.1:{self.ports['admin']}/readyz", timeout=1.0, verify=False).is_success
        except httpx.TransportError:
            return False

    @property
    def leads(self) -> bool:
        """Whether a scheduler leads and has a group."""
        try:
            return self.ready and bool(self.metrics()["lockstep_scheduler_leads"])
        except httpx.TransportError:  # it was ready just now
            return False

    def metrics(self, **labels: str) -> dict[str, float]:
        """All samples of its admin port that have these labels, summed over the others."""
        text = httpx.get(f"http://127.0.0.1:{self.ports['admin']}/metrics", verify=False).raise_for_status().text
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


class Stack:
    """A context: inside it the services run and are ready. `script` is what the scripted engine plays.

    Of several workers, each is a process with a group of its own, group-0, group-1 ...; of several schedulers, the first leads at first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        served_model_names: Sequence[str] = (),
        tensor_parallel_size: int = 1,
        workers: int = 1,
        schedulers: int = 1,
        engine: Literal["torch", "scripted", "simulated"] = "torch",
        script: Mapping[str, object] | None = None,
        worker_args: Sequence[str] = (),
        scheduler_args: Sequence[str] = (),
        gateway_args: Sequence[str] = (),
        discovery: Sequence[str] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """discovery: arguments by which schedulers find workers and each other, instead of addresses and a lease in a folder."""
        self.folder = folder
        self.names = tuple(served_model_names) or (model.name,)
        self._family = Family()
        self._family.environment |= environment
        self._discovery = discovery
        self._worker_args = ["--model", str(model), "--tensor-parallel-size", str(tensor_parallel_size), "--engine", engine]
        if script is not None:
            (folder / "script.json").write_text(json.dumps(script))
            self._worker_args += ["--script", str(folder / "script.json")]
        self._worker_args += worker_args
        self._scheduler_args, self._gateway_args = list(scheduler_args), gateway_args
        if schedulers > 1 and discovery is None:
            lease = ["--leadership", f"file:{folder / 'lease'}", "--lease-duration-s", "1.5", "--lease-renewal-s", "0.3"]
            self._scheduler_args = [*lease, *scheduler_args]
        self._num_workers, self._num_schedulers = workers, schedulers
        self.workers: list[Service] = []
        self.schedulers: list[Service] = []
        self._services: list[Service] = []
        self._clients = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            for number in range(self._num_workers):
                group = ["--group", f"group-{number}"] if self._num_workers > 1 else []
                self.workers.append(self._start("worker", *group, *self._worker_args, number=number))
            for number in range(self._num_schedulers):
                targets = self._discovery or [f"--worker={worker.address}" for worker in self.workers]
                self.schedulers.append(self._start("scheduler", *targets, *self._scheduler_args, number=number))
            names = [f"--served-model-name={name}" for name in self.names]
            targets = [f"--scheduler={scheduler.address}" for scheduler in self.schedulers]
            self.gateway = self._start("gateway", *targets, *names, *self._gateway_args)
            eventually(lambda: self._serves() or any(service.ended for service in self._services), START_S)
            assert not any(service.ended for service in self._services), "a service ended before all were ready: see the logs"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the services in order, prints their logs (pytest shows them on failure), and fails if anybody is left."""
        self._clients.close()
        try:
            for service in reversed(self._services):
                service.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # told below, as a process that is left
                    service.process.wait(STOP_S)
            self._family.end(within_s=10.0)  # what a service has started notices its end, and takes a moment on a busy machine
        finally:
            for service in self._services:
                service.process.wait(STOP_S)
                service.release_ports()
                print(f"---- {service.name}, status {service.process.returncode}\n{service.log}")

    def _serves(self) -> bool:
        return self.gateway.ready and self.client.get("/health").is_success

    def _start(self, name: str, *arguments: str, number: int = 0) -> Service:
        self._services.append(Service(name, self.folder, self._family, arguments, number))
        return self._services[-1]

    # Addresses and processes

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    @property
    def worker(self) -> Service:
        return self.workers[0]

    @property
    def scheduler(self) -> Service:
        return self.schedulers[0]

    @property
    def leader(self) -> Service:
        """The scheduler that leads, and has a group, once there is one: on a busy machine leaders change."""
        found: list[Service] = []

        def leads() -> bool:
            found[:] = [scheduler for scheduler in self.schedulers if scheduler.leads]
            return len(found) == 1

        eventually(leads, LEADS_S)
        return found[0]

    def running(self) -> list[int]:
        """How many requests each worker's group computes."""
        counts = (self.leader.metrics(engine=f"group-{number}") for number in range(self._num_workers))
        return [int(metrics.get("lockstep_num_requests_running", 0)) for metrics in counts]

    def groups_ready(self) -> int:
        return int(self.leader.metrics().get("lockstep_scheduler_group_ready", 0))

    @property
    def scheduler_address(self) -> str:
        return self.scheduler.address

    @property
    def worker_address(self) -> str:
        return self.worker.address

    def ranks(self) -> list[psutil.Process]:
        """The worker's ranks, in order."""
        return sorted(psutil.Process(self.worker.pid).children(), key=lambda rank: json.loads(rank.cmdline()[-1])["rank"])

    def living(self) -> list[psutil.Process]:
        """Every process of the stack that has not ended, also those that a killed service has left behind."""
        return self._family.living()

    # Clients

    @cached_property
    def client(self) -> httpx.Client:
        return self._clients.enter_context(httpx.Client(base_url=self.url, timeout=CLIENT_TIMEOUT_S, verify=False))

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The official client; it retries nothing."""
        return self._clients.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=CLIENT_TIMEOUT_S)
        )

    def complete(self, prompt: str | list[int], **parameters: Any) -> str:
        """The text of a legacy completion; parameters that OpenAI does not know go into `extra_body`."""
        answer = self.openai.completions.create(model=self.names[0], prompt=prompt, **parameters)
        return str(answer.choices[0].text)

    @contextlib.contextmanager
    def stream(self, prompt: str | list[int], **parameters: Any) -> Iterator[Iterator[str]]:
        """The texts of a streamed legacy completion as they come."""
        with self.openai.completions.create(model=self.names[0], prompt=prompt, stream=True, **parameters) as chunks:
            yield (chunk.choices[0].text for chunk in chunks if chunk.choices)

    def chat(self, content: str, **parameters: Any) -> str:
        """The answer to one message of a user."""
        answer = self.openai.chat.completions.create(model=self.names[0], messages=[{"role": "user", "content": content}], **parameters)
        return str(answer.choices[0].message.content)
