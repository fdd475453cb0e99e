"""Requests against a stack whose parts are killed, stopped and drained all the time: `make chaos REQUESTS=100000`.

Two workers with simulated groups, which also crash by themselves, two schedulers, and a gateway, which stays. Clients ask at random, whole
or streamed, and leave at random. Simulated tokens can be verified, so that an answer is right, or is an error that says so, or its client
has left; nothing else may come, and nothing may be left behind.
"""

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from services.worker.engine.simulated import Language
from tests import tiny
from tests.e2e.stack import Service, Stack
from tests.processes import eventually

GROUPS, PAGES, SLOTS = 3, 400, 16  # of each worker
MEAN_TOKENS = 30
MAX_WAITING = 64
AT_A_TIME = 192  # more than there are slots, and sometimes more than may wait
LEAVES = 0.15  # of the clients
LONGEST_RETRY_S = 2.0  # a client that is refused waits as long as it is told, but no longer
BREAK_EVERY_S = 1.0  # about
CRASHES = json.dumps([{"kind": "crash", "probability": 0.0002}, {"kind": "delay", "probability": 0.002, "seconds": 0.05}])
REST_S = 60.0  # until everything is at rest, on a busy machine
TELL_EVERY_S = 5.0


def chaotic_stack(folder: Path) -> Stack:
    simulated = ["--groups", str(GROUPS), "--num-pages", str(PAGES), "--max-num-seqs", str(SLOTS), "--drain-s", "2"]
    return Stack(
        folder,
        model=tiny.weightless_model(folder / "tiny"),
        engine="simulated",
        workers=2,
        schedulers=2,
        worker_args=[*simulated, "--simulated-mean-tokens", str(MEAN_TOKENS), "--simulated-faults", CRASHES],
        scheduler_args=["--max-waiting-requests", str(MAX_WAITING), "--log-level", "warning"],
        gateway_args=["--log-level", "warning"],
    )


@dataclass
class Outcome:
    """What became of all requests, and what broke meanwhile."""

    ends: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what must not be

    @property
    def requests(self) -> int:
        return self.ends.total()


class Chaos:
    def __init__(self, stack: Stack, seed: int, break_every_s: float = BREAK_EVERY_S) -> None:
        self._stack, self._seed, self._break_every_s = stack, seed, break_every_s
        self._random = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(stack.folder / "tiny" / "tokenizer.json"))
        self._language = Language(tiny.VOCAB_SIZE, (tiny.CONFIG["eos_token_id"],), MEAN_TOKENS)
        self._beginnings = [self._ids(self._random, 40) for _ in range(8)]
        self._next = 0
        self._failed: Exception | None = None  # of the clients' thread
        self.outcome = Outcome()

    def run(self, requests: int, tell: Callable[[Outcome], None]) -> None:
        """Asks so many times, breaks things until all have ended, and mends them. Clients have a thread of their own, since services must
        be started by one that outlives them."""
        clients = threading.Thread(target=lambda: asyncio.run(self._clients(requests)))
        clients.start()
        next_tell_at = time.monotonic()
        for fault in self._faults():
            clients.join(self._random.uniform(0.5, 1.5) * self._break_every_s)
            if not clients.is_alive():
                break
            self._mend()
            fault()
            self.outcome.breaks[fault.__name__.strip("_").replace("_", " ")] += 1
            if time.monotonic() >= next_tell_at:
                tell(self.outcome)
                next_tell_at = time.monotonic() + TELL_EVERY_S
        self._mend()
        if self._failed is not None:
            raise self._failed

    # Clients

    async def _clients(self, requests: int) -> None:
        try:
            await asyncio.gather(*(self._client(requests) for _ in range(AT_A_TIME)))
        except Exception as error:  # the edge of the thread
            self._failed = error

    async def _client(self, requests: int) -> None:
        """Has a pool of its own: to look through one with all connections costs seven times what a request does."""
        async with httpx.AsyncClient(base_url=self._stack.url, timeout=120.0, verify=False, trust_env=False) as client:
            await self._ask(client, requests)

    async def _ask(self, client: httpx.AsyncClient, requests: int) -> None:
        while self._next < requests:
            self._next += 1
            chance = random.Random(self._seed * 1_000_003 + self._next)
            prompt = chance.choice(self._beginnings)[: chance.randint(1, 40)] + self._ids(chance, chance.randint(1, 30))
            body = {"model": "tiny", "prompt": prompt, "max_tokens": chance.randint(1, 100), "stream": chance.random() < 0.5}
            if chance.random() < LEAVES:
                await self._leave(body, chance.uniform(0.0, 0.5))
                self.outcome.ends["the client left"] += 1
                continue
            try:
                self.outcome.ends[await self._answer(client, body)] += 1
            except httpx.HTTPError as error:
                self.outcome.ends[self._wrong(f"{type(error).__name__}: {error}")] += 1

    async def _leave(self, body: dict[str, object], after_s: float) -> None:
        """Asks, and closes the connection after a while, whatever has come."""
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._stack.gateway.ports["http"])
        writer.write(head.encode() + data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(after_s):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                if response.status_code not in (429, 503) or "retry-after" not in response.headers:
                    return self._wrong(f"{response.status_code}: {error}")
                await asyncio.sleep(min(float(response.headers["retry-after"]), LONGEST_RETRY_S))
                return f"{response.status_code}: {error['message']}"
            if body["stream"]:
                lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
                error = json.loads(lines[-1])["error"] if lines[-1] != "[DONE]" else None
                if error is not None:
                    # A stream begins, without text, when a request has waited for long; so overload may be told there, but not later.
                    kinds = ("server_error",) if len(lines) > 1 else ("server_error", "rate_limit_error")
                    return f"in a stream: {error['message']}" if error["type"] in kinds else self._wrong(f"{error} after {lines[:-1]}")
                chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
                text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
            else:
                choice = json.loads(await response.aread())["choices"][0]
                text, reason = choice["text"], choice["finish_reason"]
        return "answered" if (text, reason) == self._expected(body) else self._wrong(f"{body}: {text!r}, {reason}")

    def _expected(self, body: dict[str, object]) -> tuple[str, str]:
        ids = self._language.completion(body["prompt"], body["max_tokens"])  # type: ignore[arg-type]
        stopped = ids[-1] in self._language.eos_ids
        return self._tokenizer.decode(ids[:-1] if stopped else ids), "stop" if stopped else "length"

    def _wrong(self, what: str) -> str:
        self.outcome.wrong.append(what)
        print(f"WRONG {what[:500]}", flush=True)  # a long run may be ended before its summary
        return "WRONG"

    @staticmethod
    def _ids(chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(3, 300) for _ in range(count)]  # all are tokens: the end of the vocabulary is padding

    # Faults

    def _faults(self) -> Iterator[Callable[[], None]]:
        """Without an end: each once, in random order, and again."""
        faults = [self._kill_worker, self._drain_worker, self._kill_leader, self._stop_leader, self._suspend_leader]
        while True:
            self._random.shuffle(faults)
            yield from faults

    def _mend(self) -> None:
        """Does what a kubelet does. On a busy machine a leader may be too slow to keep its lease, and step down."""
        for service in (*self._stack.workers, *self._stack.schedulers):
            if service.ended:
                self.outcome.breaks[f"a {service.name} ended by itself"] += 1
                service.start_again()

    def _kill_worker(self) -> None:
        worker = self._random.choice(self._stack.workers)
        worker.kill()
        worker.start_again()

    def _drain_worker(self) -> None:
        _end(self._random.choice(self._stack.workers))

    def _kill_leader(self) -> None:
        leader = self._leader()
        leader.kill()
        leader.start_again()

    def _stop_leader(self) -> None:
        _end(self._leader())

    def _suspend_leader(self) -> None:
        leader = self._leader()
        leader.process.send_signal(signal.SIGSTOP)
        try:
            self._leader()  # the other one, since this cannot say that it leads
        finally:
            leader.process.send_signal(signal.SIGCONT)
        eventually(lambda: leader.ended, REST_S)
        leader.start_again()

    def _leader(self) -> Service:
        """Waits for it; what ends by itself meanwhile must be started again."""
        leaders: list[Service] = []

        def one_leads() -> bool:
            self._mend()
            leaders[:] = [scheduler for scheduler in self._stack.schedulers if scheduler.leads]
            return len(leaders) == 1

        eventually(one_leads, REST_S)
        return leaders[0]


def _end(service: Service) -> None:
    service.terminate()
    eventually(lambda: service.ended, REST_S)
    assert service.process.returncode == 0, service.log
    service.start_again()


# What must be as before

NOTHING_LEFT = ("num_requests_running", "num_requests_waiting", "scheduler_outstanding_plans")


@dataclass(frozen=True)
class Rest:
    """What a stack at rest holds."""

    gateway_descriptors: int
    leader_descriptors: int
    gateway_bytes: int  # of memory

    @classmethod
    def of(cls, stack: Stack) -> "Rest":
        """Waits until nothing is left of any request. Fails when that does not come."""
        eventually(lambda: sum(scheduler.leads for scheduler in stack.schedulers) == 1, REST_S)
        eventually(lambda: stack.groups_ready() == 2 * GROUPS, REST_S)
        eventually(lambda: not sum(stack.leader.metrics()[f"lockstep_{name}"] for name in NOTHING_LEFT), REST_S)
        pages = {state: stack.leader.metrics(state=state)["lockstep_scheduler_pages"] for state in ("owned", "pending", "cooling")}
        assert not any(pages.values()), pages
        free = sum(stack.leader.metrics(state=state)["lockstep_scheduler_pages"] for state in ("ready", "cached"))
        assert free == 2 * GROUPS * (PAGES - 1)
        eventually(lambda: not stack.gateway.metrics(endpoint="/v1/completions")["lockstep_gateway_inflight_requests"], REST_S)
        gateway, leader = psutil.Process(stack.gateway.pid), psutil.Process(stack.leader.pid)
        return cls(gateway.num_fds(), leader.num_fds(), gateway.memory_info().rss)


def show(outcome: Outcome, seconds: float, before: Rest, after: Rest) -> None:
    console = Console(width=160)
    for title, counts in (("how requests ended", outcome.ends), ("what was done to them", outcome.breaks)):
        table = Table(title=title, title_justify="left", box=None)
        table.add_column("times", justify="right")
        table.add_column("")
        for what, times in counts.most_common():
            table.add_row(f"{times:,}", what)
        console.print(table)
    console.print(f"{outcome.requests:,} requests in {seconds:.0f} s")
    console.print(f"descriptors of the gateway {before.gateway_descriptors} -> {after.gateway_descriptors}", end=", ")
    console.print(f"of the leader {before.leader_descriptors} -> {after.leader_descriptors}", end=", ")
    console.print(f"memory of the gateway {before.gateway_bytes >> 20} -> {after.gateway_bytes >> 20} MB")


def main(
    requests: Annotated[int, typer.Argument(min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Of what clients ask and of the order of faults.")] = 0,
    break_every_s: Annotated[float, typer.Option(min=0.1, help="From one fault's end to the next, on average.")] = BREAK_EVERY_S,
) -> None:
    """Requests against a stack whose parts are killed, stopped and drained all the time."""
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder, chaotic_stack(Path(folder)) as stack:
        before, begun = Rest.of(stack), time.monotonic()

        def tell(outcome: Outcome) -> None:
            took = time.monotonic() - begun
            counts = f"{outcome.requests:,} of {requests:,} ended, {outcome.breaks.total()} faults, {len(outcome.wrong)} wrong"
            print(f"{took:6.0f} s  {counts}", flush=True)

        chaos = Chaos(stack, seed, break_every_s)
        chaos.run(requests, tell)
        seconds, after = time.monotonic() - begun, Rest.of(stack)
        show(chaos.outcome, seconds, before, after)
    if chaos.outcome.wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
