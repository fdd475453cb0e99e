"""The three services as real processes on ports that the kernel picks, each of which a test may kill."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import Family, eventually

START_S = 100.0  # the demo model on a busy machine
STOP_S = 10.0
CLIENT_TIMEOUT_S = 60.0


class Service:
    """`python -m services.NAME`, with its output in a file."""

    def __init__(self, name: str, folder: Path, family: Family, arguments: Sequence[str]) -> None:
        self.name, self.log_file = name, folder / f"{name}.log"
        self._ports_file = folder / f"{name}-ports.json"
        common = ["--port", "0", "--admin-port", "0", "--ports-file", str(self._ports_file), "--parent-pid", str(os.getpid())]
        with self.log_file.open("a") as log:
            command = [sys.executable, "-m", f"services.{name}", *common, *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=family.environment)
        eventually(lambda: self._ports_file.exists() or self.ended, START_S)
        assert not self.ended, f"the {name} ended at start with status {self.process.returncode}:\n{self.log}"

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

    def metrics(self) -> dict[str, float]:
        """All samples of its admin port, summed over their labels."""
        text = httpx.get(f"http://127.0.0.1:{self.ports['admin']}/metrics").raise_for_status().text
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


class Stack:
    """A context: inside it the services run and are ready. `script` is what the scripted engine plays."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        served_model_names: Sequence[str] = (),
        tensor_parallel_size: int = 1,
        engine: Literal["torch", "scripted"] = "torch",
        script: Mapping[str, object] | None = None,
        worker_args: Sequence[str] = (),
        scheduler_args: Sequence[str] = (),
        gateway_args: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.names = tuple(served_model_names) or (model.name,)
        self._family = Family()
        self._worker_args = ["--model", str(model), "--tensor-parallel-size", str(tensor_parallel_size), "--engine", engine]
        if script is not None:
            (folder / "script.json").write_text(json.dumps(script))
            self._worker_args += ["--script", str(folder / "script.json")]
        self._worker_args += worker_args
        self._scheduler_args, self._gateway_args = scheduler_args, gateway_args
        self._services: list[Service] = []
        self._clients = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self.worker = self._start("worker", *self._worker_args)
            self.scheduler = self._start("scheduler", "--worker", self.worker.address, *self._scheduler_args)
            names = [f"--served-model-name={name}" for name in self.names]
            self.gateway = self._start("gateway", "--scheduler", self.scheduler.address, *names, *self._gateway_args)
            eventually(lambda: self.client.get("/health").is_success or any(service.ended for service in self._services), START_S)
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
            self._family.end(within_s=1.0)
        finally:
            for service in self._services:
                service.process.wait(STOP_S)
                print(f"---- {service.name}, status {service.process.returncode}\n{service.log}")

    def _start(self, name: str, *arguments: str) -> Service:
        self._services.append(Service(name, self.folder, self._family, arguments))
        return self._services[-1]

    # Addresses and processes

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

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
        return self._clients.enter_context(httpx.Client(base_url=self.url, timeout=CLIENT_TIMEOUT_S))

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
