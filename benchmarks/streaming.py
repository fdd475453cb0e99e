"""How many tokens one gateway process streams, beside a bare uvicorn application that sends as much at the same pace.

Both get the same load: so many streams, of each of which a step brings one token. The bare application does nothing but write an event of
the same size for each, so its cost is what HTTP costs in this process model.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from benchmarks.event_streams import opened, request_of
from benchmarks.gateway import DELAY, difference, histograms, quantile
from benchmarks.report import Report, Value
from benchmarks.stack import listener, scripted_stack

WARM_UP_TOKENS = 20
MAX_LENGTH = 100_000


def streaming(streams: int, step_ms: float, tokens: int) -> Report:
    """`streams` at once, of `tokens` each, at one token a stream every `step_ms`."""
    rows: list[tuple[Value, ...]] = []
    with _bare(step_ms) as (url, pid):
        uvloop.run(_load(url, "bare", streams, WARM_UP_TOKENS))
        loaded = _measured(pid, lambda: _load(url, "bare", streams, tokens))
        rows.append(("bare uvicorn", *loaded.figures(), None, None))
    script = {"step_s": step_ms / 1e3, "default": {"ids": [40, 41, 42, 43], "repeat": True}}
    with scripted_stack(script, MAX_LENGTH, worker_max_num_seqs=streams) as running:
        pid = listener(running.url)
        uvloop.run(_load(running.url, running.model, streams, WARM_UP_TOKENS))
        before = histograms(running)[DELAY]
        served = _measured(pid, lambda: _load(running.url, running.model, streams, tokens))
        delay = difference(histograms(running)[DELAY], before)
        rows.append(("gateway", *served.figures(), quantile(delay, 0.5) * 1e3, quantile(delay, 0.99) * 1e3))
    share, cost = served.rate / loaded.rate, loaded.cpu_s / loaded.tokens / (served.cpu_s / served.tokens)
    return Report(
        name="streaming",
        columns=("server", "tokens/s", "events/s", "CPU", "tokens per CPU s", "delay p50, ms", "delay p99, ms"),
        rows=rows,
        notes=(
            f"{streams} streams of {tokens} tokens, a token each every {step_ms:g} ms: {streams / step_ms * 1e3:,.0f} a second.",
            f"gateway / bare: {share:.2f} of the tokens/s, {cost:.2f} of the tokens per CPU second. All processes share the cores.",
            "CPU: of the server's process, 1 is a whole core. Tokens that come while an event waits are sent in one.",
        ),
    )


@dataclass
class Loaded:
    """What a load was, and what it cost its server."""

    tokens: int
    events: int
    seconds: float
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def figures(self) -> tuple[float, ...]:
        return self.rate, self.events / self.seconds, self.cpu_s / self.seconds, self.tokens / self.cpu_s


def _measured(pid: int, load: Callable[[], Coroutine[Any, Any, Loaded]]) -> Loaded:
    times = psutil.Process(pid).cpu_times
    before = times()
    loaded = uvloop.run(load())
    after = times()
    loaded.cpu_s = after.user + after.system - before.user - before.system
    return loaded


async def _load(url: str, model: str, streams: int, tokens: int) -> Loaded:
    start, request = time.monotonic(), request_of(model, tokens)
    open_streams = [await opened(url, request) for _ in range(streams)]
    await asyncio.gather(*(stream.ended for stream in open_streams))
    return Loaded(streams * tokens, sum(stream.events for stream in open_streams) - streams, time.monotonic() - start)


@contextlib.contextmanager
def _bare(step_ms: float) -> Iterator[tuple[str, int]]:
    """The bare application in a process of its own: its URL and process id."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_server", str(step_ms)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
