"""A gateway with very many open streams, short requests beside them, and a client that never reads: errors, memory, health."""

import asyncio
import socket
import statistics
import time
from dataclasses import dataclass, field

import httpx
import psutil
import uvloop

from benchmarks.report import Report
from benchmarks.stack import RunningStack, scripted_stack
from benchmarks.streaming import listener, opened, port_of, request_of

STEP_S = 0.25  # of a stream: what many people read at a time, not what a GPU can
MAX_LENGTH = 100_000
SAMPLE_S = 0.25
MAX_STREAM_S = 30.0
SPARE = 512  # short requests at a time


@dataclass
class Seen:
    """What went on."""

    short: list[float] = field(default_factory=list)  # seconds of each short request
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes
    errors: list[str] = field(default_factory=list)


def endurance(streams: int, rate: float, seconds: float) -> Report:
    """`streams` open all the time, `rate` short requests a second beside them, for so long."""
    script = {"step_s": STEP_S, "default": {"ids": [40, 41, 42, 43], "repeat": True}}
    with scripted_stack(script, MAX_LENGTH, worker_max_num_seqs=streams + SPARE, gateway_max_requests=streams + SPARE) as running:
        seen = uvloop.run(_run(running, streams, rate, seconds))
    settled = seen.memory[len(seen.memory) // 4 :]
    row = (
        streams,
        len(seen.short),
        len(seen.errors),
        statistics.median(seen.short),
        _quantile(seen.health, 0.99) * 1e3,
        max(seen.health) * 1e3,
        settled[0] / 2**20,
        max(settled) / 2**20,
        settled[-1] / 2**20,
    )
    columns = ("streams", "short requests", "errors", "short p50, s", "/livez p99, ms", "/livez max, ms")
    return Report(
        name="endurance",
        columns=(*columns, "memory after a quarter, MB", "most, MB", "at the end, MB"),
        rows=[row],
        notes=(
            f"{seconds:g} s; a stream gets a token every {STEP_S:g} s, and one client has a stream that it never reads.",
            *seen.errors[:5],
        ),
    )


async def _run(running: RunningStack, streams: int, rate: float, seconds: float) -> Seen:
    seen, end = Seen(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=running.url, timeout=seconds + 60) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(_unread(running, end))
        tasks.create_task(asyncio.to_thread(_watch, running, seen, end))
        tasks.create_task(_short_requests(client, running.model, rate, seen, end))
        for _ in range(streams):
            tasks.create_task(_stream(running, seen, end))
            await asyncio.sleep(0.005)  # a thousand at one moment is another test
    return seen


async def _stream(running: RunningStack, seen: Seen, end: float) -> None:
    """One after the other; the last ends about then."""
    while (left := end - time.monotonic()) > 1:
        tokens = max(int(min(left, MAX_STREAM_S) / STEP_S), 1)
        try:
            await (await opened(running.url, request_of(running.model, tokens))).ended
        except (OSError, RuntimeError) as error:
            seen.errors.append(f"a stream: {type(error).__name__} {error}")
            return


async def _short_requests(client: httpx.AsyncClient, model: str, rate: float, seen: Seen, end: float) -> None:
    async def one() -> None:
        begun = time.monotonic()
        answer = await client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 1, "ignore_eos": True})
        seen.short.append(time.monotonic() - begun)
        if answer.is_error:
            seen.errors.append(f"a short request: {answer.status_code} {answer.text[:200]}")

    start, sent = time.monotonic(), 0
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < end:
            tasks.create_task(one())
            sent += 1
            await asyncio.sleep(max(start + sent / rate - time.monotonic(), 0))


async def _unread(running: RunningStack, end: float) -> None:
    """Asks for very much, and reads nothing."""
    with socket.create_connection(("127.0.0.1", port_of(running.url))) as connection:
        connection.sendall(request_of(running.model, MAX_LENGTH - 100))
        await asyncio.sleep(end - time.monotonic())


def _watch(running: RunningStack, seen: Seen, end: float) -> None:
    """In a thread of its own, so that it waits for nothing else here."""
    gateway = psutil.Process(listener(running.url))
    with httpx.Client(base_url=f"http://127.0.0.1:{running.admin_ports['gateway']}", timeout=60) as admin:
        while time.monotonic() < end:
            begun = time.monotonic()
            admin.get("/livez").raise_for_status()
            seen.health.append(time.monotonic() - begun)
            seen.memory.append(gateway.memory_info().rss)
            time.sleep(SAMPLE_S)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
