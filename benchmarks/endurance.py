"""A gateway with very many open streams, short requests beside them, and a client that never reads: errors, memory, health."""

import asyncio
import multiprocessing
import socket
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import httpx
import psutil
import uvloop

from benchmarks.event_streams import opened, request_of
from benchmarks.report import Report, Value
from benchmarks.stack import RunningStack, listener, port_of, scripted_stack
from shared.process import allow_many_files

STEP_S = 0.25  # of a stream: what many people read at a time, not what a GPU can
MAX_LENGTH = 100_000
SAMPLE_S = 0.25
MAX_STREAM_S = 30.0
SPARE = 512  # short requests at a time
UNREAD_CHOICES = 32  # of the client that never reads: more in two minutes than sockets hold

LIVEZ_P99_MS, LIVEZ_MAX_MS = 100.0, 1000.0
GROWTH = 0.05  # of the memory that was used after a quarter of the time: more is no flat line


@dataclass
class Seen:
    """What went on."""

    open: int = 0  # streams
    least_open: int | None = None  # since all were open
    events: int = 0  # of streams that have ended
    short: list[float] = field(default_factory=list)  # seconds of each short request
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes
    errors: list[str] = field(default_factory=list)


def endurance(streams: int, rate: float, seconds: float) -> Report:
    """`streams` open all the time, `rate` short requests a second beside them, for so long."""
    allow_many_files()
    script = {"step_s": STEP_S, "default": {"ids": [40, 41, 42, 43], "repeat": True}}
    with scripted_stack(script, MAX_LENGTH, worker_max_num_seqs=streams + SPARE, gateway_max_requests=streams + SPARE) as running:
        seen = uvloop.run(_run(running, streams, rate, seconds))
    rows, holds = _judged(seen)
    return Report(
        name="endurance",
        columns=("what", "seen", "wanted", "holds"),
        rows=rows,
        notes=(
            f"{seconds:g} s; {streams} streams with a token every {STEP_S:g} s, {rate:g} short requests a second, and one client that asks "
            f"for {UNREAD_CHOICES} choices and never reads.",
            "everything holds" if holds else "NOT everything holds",
            *seen.errors[:5],
        ),
    )


def _judged(seen: Seen) -> tuple[list[tuple[Value, ...]], bool]:
    """The rows of the table, and whether all that is wanted was seen."""
    quarter = len(seen.memory) // 4
    settled, last = (statistics.median(part) / 2**20 for part in (seen.memory[quarter : 2 * quarter], seen.memory[3 * quarter :]))
    p99, most = _quantile(seen.health, 0.99) * 1e3, max(seen.health) * 1e3
    judged: list[tuple[str, float, str, bool]] = [
        ("errors", len(seen.errors), "0", not seen.errors),
        ("/livez p99, ms", p99, f"< {LIVEZ_P99_MS:g}", p99 < LIVEZ_P99_MS),
        ("/livez max, ms", most, f"< {LIVEZ_MAX_MS:g}", most < LIVEZ_MAX_MS),
        ("memory in the second quarter, MB", settled, "", True),
        ("memory in the last quarter, MB", last, f"< {settled * (1 + GROWTH):.4g}", last < settled * (1 + GROWTH)),
    ]
    facts: list[tuple[str, float]] = [
        ("most memory, MB", max(seen.memory) / 2**20),
        ("streams open, at least", seen.least_open or 0),
        ("events of streams that ended", seen.events),
        ("short requests", len(seen.short)),
        ("short requests p50, s", statistics.median(seen.short)),
        ("short requests p99, s", _quantile(seen.short, 0.99)),
    ]
    rows: list[tuple[Value, ...]] = [
        (what, value, wanted, ("yes" if holds else "NO") if wanted else "") for what, value, wanted, holds in judged
    ]
    return [*rows, *((what, value, "", "") for what, value in facts)], all(holds for *_, holds in judged)


async def _run(running: RunningStack, streams: int, rate: float, seconds: float) -> Seen:
    seen, end = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, timeout=seconds + 60, limits=limits) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(_unread(running, end))
        tasks.create_task(asyncio.to_thread(_watch, running, seen, end))
        tasks.create_task(_probes(running, seen, end))
        tasks.create_task(_short_requests(client, running.model, rate, seen, end))
        for _ in range(streams):
            tasks.create_task(_stream(running, seen, end))
            await asyncio.sleep(0.005)  # a thousand at one moment is another test
        seen.least_open = seen.open
    return seen


async def _stream(running: RunningStack, seen: Seen, end: float) -> None:
    """One after the other; the last ends about then."""
    while (left := end - time.monotonic()) > 1:
        tokens = max(int(min(left, MAX_STREAM_S) / STEP_S), 1)
        seen.open += 1
        try:
            stream = await opened(running.url, request_of(running.model, tokens))
            await stream.ended
        except (OSError, RuntimeError) as error:
            seen.errors.append(f"a stream: {type(error).__name__} {error}")
            return
        finally:
            seen.open -= 1
        seen.events += stream.events


async def _short_requests(client: httpx.AsyncClient, model: str, rate: float, seen: Seen, end: float) -> None:
    async def one() -> None:
        begun = time.monotonic()
        try:
            answer = await client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 1, "ignore_eos": True})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            seen.errors.append(f"a short request: {type(error).__name__} {error}")
        seen.short.append(time.monotonic() - begun)

    start, sent = time.monotonic(), 0
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < end:
            tasks.create_task(one())
            sent += 1
            await asyncio.sleep(max(start + sent / rate - time.monotonic(), 0))


async def _unread(running: RunningStack, end: float) -> None:
    """Asks for very much, and reads nothing."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port_of(running.url)))
        connection.sendall(request_of(running.model, MAX_LENGTH - 100, n=UNREAD_CHOICES))
        await asyncio.sleep(end - time.monotonic())


async def _probes(running: RunningStack, seen: Seen, end: float) -> None:
    """In a process of its own: a probe must not wait for the clients of this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        url = f"http://127.0.0.1:{running.admin_ports['gateway']}"
        health, errors = await asyncio.get_running_loop().run_in_executor(process, _probe, url, end)
    seen.health += health
    seen.errors += errors


def _probe(url: str, end: float) -> tuple[list[float], list[str]]:
    """Seconds of each probe, and what went wrong. end: by the monotonic clock."""
    health, errors = [], []
    with httpx.Client(base_url=url, timeout=60) as admin:
        while time.monotonic() < end:
            begun = time.monotonic()
            try:
                admin.get("/livez").raise_for_status()
            except httpx.HTTPError as error:
                errors.append(f"/livez: {type(error).__name__} {error}")
            health.append(time.monotonic() - begun)
            time.sleep(SAMPLE_S)
    return health, errors


def _watch(running: RunningStack, seen: Seen, end: float) -> None:
    """In a thread of its own, so that it waits for nothing else here."""
    gateway = psutil.Process(listener(running.url))
    while (now := time.monotonic()) < end:
        seen.memory.append(gateway.memory_info().rss)
        if seen.least_open is not None and end - now > 2:
            seen.least_open = min(seen.least_open, seen.open)
        time.sleep(SAMPLE_S)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
