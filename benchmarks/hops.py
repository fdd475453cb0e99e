"""What a message costs between two processes of one host: gRPC as the services use it, to a process that answers at once with little."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import grpc
import uvloop

from benchmarks.report import Report
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionServicer, ExecutionStub, add_ExecutionServicer_to_server
from shared.rpc import SERVER_OPTIONS, channel, start_server

SIZES = (100, 70_000)  # bytes: a decode plan, and a prefill plan of 16 prompts of 1,024 ids
PAUSES_S = (0.0, 0.02)  # before each message
TIMES, FIRST = 30, 6  # of which so many are not counted
Times = list[tuple[float, int, list[float]]]  # (seconds of pause, bytes, seconds each)


def hops() -> Report:
    """One process asks, another answers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        measured = uvloop.run(_measured(ours.recv()))
    finally:
        server.terminate()
        server.join()
    return Report(
        name="hops",
        columns=("pause ms", "bytes", "ms", "least", "most"),
        rows=[(1e3 * pause_s, size, 1e3 * median(times), 1e3 * min(times), 1e3 * max(times)) for pause_s, size, times in measured],
        notes=("from a message to its answer, two hops; a pause before each lets processes and caches cool down",),
        raw={f"{size} bytes after {pause_s:g} s": times for pause_s, size, times in measured},
    )


class _Echo(ExecutionServicer):
    async def Execute(
        self, requests: AsyncIterator[pb.ExecutionExecuteRequest], context: Any
    ) -> AsyncIterator[pb.ExecutionExecuteResponse]:
        async for _ in requests:
            yield pb.ExecutionExecuteResponse(heartbeat=pb.ExecuteHeartbeat())


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_ExecutionServicer_to_server(_Echo(), server)  # type: ignore[abstract]  # nobody asks for more
        port = await start_server(server, "127.0.0.1", 0)
        pipe.send(port)
        await server.wait_for_termination()

    uvloop.run(serve())


async def _measured(port: int) -> Times:
    found = []
    async with channel(f"127.0.0.1:{port}") as opened:
        call = ExecutionStub(opened).Execute()
        for pause_s in PAUSES_S:
            for size in SIZES:
                times = []
                for _ in range(TIMES):
                    await asyncio.sleep(pause_s)
                    start = time.perf_counter()
                    await call.write(pb.ExecutionExecuteRequest(plan=bytes(size)))
                    await call.read()
                    times.append(time.perf_counter() - start)
                found.append((pause_s, size, times[FIRST:]))
        call.cancel()
    return found
