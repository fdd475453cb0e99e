"""A worker process, or those of a group over several nodes, and a scheduler's end of their streams, for tests."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc
import psutil

from shared.ports import port_of, reserve
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.protocol.plan import Plan, encode
from shared.rpc import PROTOCOL_VERSION, Outbox, channel, received

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # this host's name may stand for no address of its own


class Worker:
    """`python -m services.worker` on a port that the kernel picks."""

    def __init__(self, folder: Path, *arguments: str, reservations: Sequence[socket.socket] = ()) -> None:
        """reservations: of ports that `arguments` name; closed by `clean_up`."""
        self.arguments, self.ports_file, self.log_file = arguments, folder / "ports.json", folder / "log"
        self._reservations = reservations
        command = [
            sys.executable,
            "-m",
            "services.worker",
            "--port",
            "0",
            "--admin-port",
            "0",
            "--ports-file",
            str(self.ports_file),
            *arguments,
        ]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env={**os.environ, **ENVIRONMENT})

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def last_line(self) -> str:
        return self.log.strip().splitlines()[-1]

    def ranks(self) -> list[psutil.Process]:
        """In rank order."""
        return sorted(psutil.Process(self.process.pid).children(), key=lambda rank: json.loads(rank.cmdline()[-1])["rank"])

    async def ready(self, within_s: float = 100.0) -> ExecutionStub:
        """A stub of the worker, once its group is ready."""
        return await self.loading("ready", within_s)

    async def loading(self, phase: str, within_s: float = 100.0) -> ExecutionStub:
        """A stub of the worker, once it has come to this phase."""
        async with asyncio.timeout(within_s):
            while not self.ports_file.exists():
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.02)
            stub = ExecutionStub(grpc.aio.insecure_channel(f"127.0.0.1:{self.port}"))
            while (await describe(stub)).phase != phase:
                await asyncio.sleep(0.02)
        return stub

    @property
    def port(self) -> int:
        return int(json.loads(self.ports_file.read_text())["grpc"])

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{json.loads(self.ports_file.read_text())['admin']}"

    async def ended(self, within_s: float) -> int:
        """The exit status, once the process and all of its ranks are gone."""
        return await asyncio.to_thread(self.process.wait, within_s)

    def clean_up(self) -> None:
        """Kills it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        for each in self._reservations:
            each.close()
        print(self.log)


def over_nodes(folder: Path, nodes: int, *arguments: str, last: Sequence[str] = ()) -> list[Worker]:
    """The workers of one group, the leader first, each with a folder of its own. The ports where they meet are theirs until its `clean_up`.

    last: what only the last one is told.
    """
    reservations = [reserve("127.0.0.1") for _ in range(2)]
    port, leader_port = map(port_of, reservations)
    ports = ("--port", str(port), "--leader-port", str(leader_port), "--leader-address", "127.0.0.1")
    workers = []
    for index in range(nodes):
        own = folder / f"node-{index}"
        own.mkdir(parents=True)
        place = ("--nodes", str(nodes), "--node-index", str(index))
        more = last if index == nodes - 1 else ()
        workers.append(Worker(own, *arguments, *ports, *place, *more, reservations=() if index else reservations))
    return workers


@contextlib.contextmanager
def worker(folder: Path, *arguments: str) -> Iterator[Worker]:
    running = Worker(folder, *arguments)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.wait(30)
        print(running.log)


async def describe(stub: ExecutionStub) -> pb.WorkerGroup:
    response = await stub.Describe(pb.ExecutionDescribeRequest(protocol_version=PROTOCOL_VERSION))
    (group,) = response.groups
    return group


class Execution:
    """An Execute stream after its welcome."""

    def __init__(self, outbox: Outbox[pb.ExecutionExecuteRequest], incoming: AsyncIterator[pb.ExecutionExecuteResponse]) -> None:
        self.outbox, self.incoming = outbox, incoming
        self.welcome = pb.ExecuteWelcome()

    def send(self, plan: Plan | bytes) -> None:
        self.outbox.put(pb.ExecutionExecuteRequest(plan=plan if isinstance(plan, bytes) else encode(plan)))

    async def result(self) -> pb.PlanResult:
        async for message in self.incoming:
            if message.WhichOneof("message") == "result":
                return message.result
        raise AssertionError("the stream has ended")


@contextlib.asynccontextmanager
async def execution(port: int, epoch: int = 1, stream: int = 1, group: str = "group-0") -> AsyncIterator[Execution]:
    """Says hello and waits for the welcome, on a connection of its own."""
    async with channel(f"127.0.0.1:{port}") as opened:
        outbox: Outbox[pb.ExecutionExecuteRequest] = Outbox(lambda: pb.ExecutionExecuteRequest(heartbeat=pb.ExecuteHeartbeat()))
        hello = pb.ExecuteHello(protocol_version=PROTOCOL_VERSION, group=group, epoch=epoch, stream=stream)
        outbox.put(pb.ExecutionExecuteRequest(hello=hello))
        opened_stream = Execution(outbox, received(aiter(ExecutionStub(opened).Execute(aiter(outbox))), "the worker"))
        async for message in opened_stream.incoming:
            if message.WhichOneof("message") == "welcome":
                opened_stream.welcome = message.welcome
                break
        yield opened_stream
