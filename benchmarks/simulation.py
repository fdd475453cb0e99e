"""A scheduler in front of simulated workers, as processes, with a distance between them; and a client of the scheduler's."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import simulated_model
from benchmarks.simulated_model import EOS, VOCAB_SIZE
from shared.protocol import generation_pb2 as pb
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.protocol.plan import ids_from_bytes
from shared.rpc import PROTOCOL_VERSION, Outbox, channel, received

START_S = 60.0
MAX_LENGTH = 32_768


def model_folder(folder: Path) -> Path:
    """What a simulated worker needs of a model whose size is named: ids, no weights, a tokenizer that nobody reads."""
    config = {"architectures": ["Simulated"], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": MAX_LENGTH}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def build_proxy(folder: Path) -> Path:
    """Compiles the delaying proxy. Raises RuntimeError where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("the delaying proxy is compiled on the fly, and no C compiler (cc, gcc, clang) is on the PATH")
    program = folder / "delayproxy"
    subprocess.run([compiler, "-O2", "-o", str(program), str(Path(__file__).with_name("delayproxy.c"))], check=True)
    return program


@contextlib.contextmanager
def distant(proxy: Path, port: int, delay_us: int) -> Iterator[int]:
    """A port that leads to `port`, `delay_us` away each way."""
    command = [str(proxy), str(port), str(delay_us)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # ends with its input
        assert process.stdout is not None  # it is a pipe
        yield int(process.stdout.readline())


@contextlib.contextmanager
def service(name: str, *arguments: str) -> Iterator[dict[str, int]]:
    """`python -m services.NAME` on free ports, until the block ends. Yields its ports once it answers."""
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        ports_file, log = Path(folder) / "ports.json", Path(folder) / "log"
        command = [sys.executable, "-m", f"services.{name}", "--port", "0", "--admin-port", "0", "--ports-file", str(ports_file)]
        with log.open("w") as output:
            process = subprocess.Popen([*command, "--log-level", "warning", "--parent-pid", str(os.getpid()), *arguments], stderr=output)
        try:
            _wait(lambda: ports_file.exists(), process, log)
            ports: dict[str, int] = json.loads(ports_file.read_text())
            _wait(lambda: httpx.get(f"http://127.0.0.1:{ports['admin']}/readyz", trust_env=False).status_code == 200, process, log)
            yield ports
        except BaseException:
            print(f"the log of {name}:\n{log.read_text()}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a service did not become ready:\n{log.read_text()}")
        time.sleep(0.02)


async def counters(client: httpx.AsyncClient, port: int, *prefixes: str) -> dict[str, float]:
    """The counters of a service's admin port whose name begins so, all labels of a name added up.

    With many groups, parsing everything would keep the event loop longer than a session may be silent.
    """
    text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    wanted = "".join(line for line in text.splitlines(keepends=True) if line.startswith(prefixes))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


class Answer:
    """What has come for one request."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.ids: list[int] = []
        self.submitted_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.ended = asyncio.Event()

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None  # it has ended
        return self.first_token_at - self.submitted_at


class Client:
    """A gateway reduced to its session."""

    def __init__(self, stub: GenerationStub) -> None:
        self._outbox: Outbox[pb.GenerationSessionRequest] = Outbox(lambda: pb.GenerationSessionRequest(heartbeat=pb.SessionHeartbeat()))
        hello = pb.SessionHello(protocol_version=PROTOCOL_VERSION, gateway="benchmark")
        self._outbox.put(pb.GenerationSessionRequest(hello=hello))
        self.call = stub.Session(aiter(self._outbox))
        self._answers: dict[int, Answer] = {}
        self._random = np.random.default_rng(0)
        self._submitted = 0
        self.tokens = 0  # of all answers so far

    def submit(self, prompt_tokens: int, max_tokens: int, ignore_eos: bool) -> int:
        """A request with a prompt that no other has. Returns its number."""
        self._submitted += 1
        prompt = simulated_model.random_ids(self._random, prompt_tokens)
        self._answers[self._submitted] = Answer(prompt.tolist())
        message = simulated_model.submit(self._submitted, prompt, max_tokens, ignore_eos=ignore_eos)
        self._outbox.put(pb.GenerationSessionRequest(submit=message))
        return self._submitted

    def cancel(self, request: int) -> None:
        self._outbox.put(pb.GenerationSessionRequest(cancel=pb.Cancel(request=request, attempt=1)))

    async def end_all(self) -> None:
        """Cancels whatever has not ended, and waits for it."""
        for request in list(self._answers):
            self.cancel(request)
        await asyncio.gather(*(self.ended(request) for request in list(self._answers)))

    async def ended(self, request: int) -> Answer:
        """Its answer, once it is whole or cancelled."""
        answer = self._answers[request]
        await answer.ended.wait()
        del self._answers[request]
        return answer

    async def read(self) -> None:
        """Until the session ends."""
        async for message in received(aiter(self.call), "the scheduler"):
            now = time.perf_counter()
            for tokens in message.batch.tokens:
                answer = self._answers[tokens.request]
                answer.first_token_at = answer.first_token_at or now
                ids = ids_from_bytes(tokens.ids).tolist()
                answer.ids += ids
                self.tokens += len(ids)
            for rejected in message.batch.rejected:
                raise RuntimeError(f"request {rejected.request} was rejected: {rejected.detail}")
            for finished in message.batch.finished:
                if finished.reason == pb.FINISH_REASON_ERROR:
                    raise RuntimeError(f"request {finished.request} ended with an error: {finished.detail}")
                self._answers[finished.request].ended.set()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that has a connection: on a busy machine the first attempt may be given up."""
    async with channel(f"127.0.0.1:{port}") as opened:
        async with asyncio.timeout(START_S):
            await opened.channel_ready()
        yield opened


async def _serving(opened: grpc.aio.Channel) -> None:
    """Waits until the scheduler leads and has a group: at its start it is ready before, to stand by."""
    async with asyncio.timeout(START_S):
        async for health in health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest()):
            if health.status == health_pb2.HealthCheckResponse.SERVING:
                return


@contextlib.asynccontextmanager
async def session(port: int) -> AsyncIterator[Client]:
    """A client of the scheduler at `port`. What fails in its reader fails the block."""
    async with connected(port) as opened, asyncio.TaskGroup() as tasks:
        await _serving(opened)
        client = Client(GenerationStub(opened))
        reader = tasks.create_task(client.read())
        yield client
        reader.cancel()
        client.call.cancel()
