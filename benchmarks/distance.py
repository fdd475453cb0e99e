"""What a distance between scheduler and worker costs: idle time of the device, time to first token, tokens that nobody needed.

The worker is simulated, all else is real: processes, gRPC, and a proxy that delays every byte. Load: rows that decode for ever, and
newcomers in between; then requests that end by themselves, each followed by another. The control keeps 160 ms of plans queued at
the worker, without any scheduler: what the device idles there is this machine's doing.
"""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
import numpy as np
import uvloop
from rich.progress import track

from benchmarks.report import Plot, Report, Series
from benchmarks.simulation import Client, build_proxy, connected, counters, distant, model_folder, service, session
from services.scheduler.lead import Lead
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.protocol.plan import ADMISSION, NO_STOP_ID, Plan, RowFlag, SlotFlag, encode
from shared.rpc import PROTOCOL_VERSION, Outbox, received

PROMPT_TOKENS = 64
PROBE_TOKENS = 4
PROBE_EVERY_S = 0.12
SPARE_SLOTS = 8  # for probes
PAGE_SIZE = 16
MAX_STEP_TOKENS = 512
CONTROL_QUEUE_US = 160_000
CONTROL_TOKENS = 2_400  # of a row; it goes on as a done one
WARM_UP_S = 0.8
MEAN_TOKENS = 300
MOST_TOKENS = 30_000  # of a request that is to last
CLOSED_LOOP_TOKENS = 3_000  # at most, of a request that may end by itself
CACHE_TOKENS = 640_000  # that the KV cache holds, at least


class Cell(NamedTuple):
    model: str
    rows: int
    delay_us: int


class Measured(NamedTuple):
    """Shares are of time; see the module."""

    busy: float
    control: float
    step_ms: float
    ttft_ms: float
    useful_tokens_s: float
    useful_busy: float


def distance(
    models: Sequence[str],
    rows: Sequence[int],
    delays_ms: Sequence[float],
    repeats: int,
    seconds: float,
) -> Report:
    """Every cell `repeats` times, each in another minute of the machine; medians. seconds: of each of a run's two loads."""
    measured: dict[Cell, list[Measured]] = defaultdict(list)
    stacks = [(model, round(delay_ms * 1e3)) for _ in range(repeats) for model in models for delay_ms in delays_ms]
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        proxy, model_path = build_proxy(Path(folder)), model_folder(Path(folder))
        for model, delay_us in track(stacks, description="distance"):
            found = uvloop.run(_stack(model, model_path, proxy, rows, delay_us, seconds))
            for count, figures in found.items():
                measured[Cell(model, count, delay_us)].append(figures)
    return _report(measured, models, rows, delays_ms, repeats, seconds)


async def _stack(model: str, folder: Path, proxy: Path, rows: Sequence[int], delay_us: int, seconds: float) -> dict[int, Measured]:
    """All rows' figures of one worker, a proxy and a scheduler."""
    slots = max(rows) + SPARE_SLOTS
    engine = ("--engine", "simulated", "--simulated-gpu", "h200", "--simulated-model", model, "--simulated-mean-tokens", str(MEAN_TOKENS))
    sizes = ("--max-num-seqs", str(slots), "--page-size", str(PAGE_SIZE), "--max-step-tokens", str(MAX_STEP_TOKENS))
    with (
        service("worker", "--model", str(folder), *engine, *sizes) as worker,
        distant(proxy, worker["grpc"], delay_us) as port,
    ):
        controls = {count: await _control(port, count, number + 1, seconds / 2) for number, count in enumerate(rows)}
        with service("scheduler", "--worker", f"127.0.0.1:{port}", "--max-step-tokens", str(MAX_STEP_TOKENS)) as scheduler:
            async with session(scheduler["grpc"]) as client, httpx.AsyncClient(trust_env=False) as http:
                return {count: await _cell(client, http, worker["admin"], count, controls[count], seconds) for count in rows}


async def _cell(client: Client, http: httpx.AsyncClient, admin_port: int, rows: int, control: float, seconds: float) -> Measured:
    held = [client.submit(PROMPT_TOKENS, _lasting(rows), ignore_eos=True) for _ in range(rows)]
    await asyncio.sleep(WARM_UP_S)
    await _probe(client)
    before = await counters(http, admin_port, "lockstep_worker_")
    ttfts = []
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        ttfts.append(await _probe(client))
        await asyncio.sleep(PROBE_EVERY_S)
    after = await counters(http, admin_port, "lockstep_worker_")
    for request in held:
        client.cancel(request)
    await asyncio.gather(*(client.ended(request) for request in held))
    useful_tokens_s, useful_busy = await _closed_loop(client, http, admin_port, rows, seconds)
    return Measured(_busy(before, after), control, _step_ms(before, after), median(ttfts) * 1e3, useful_tokens_s, useful_busy)


def _lasting(rows: int) -> int:
    """Tokens of requests that fit beside each other and outlast a run."""
    return min(MOST_TOKENS, CACHE_TOKENS // (rows + SPARE_SLOTS))


async def _probe(client: Client) -> float:
    return (await client.ended(client.submit(PROMPT_TOKENS, PROBE_TOKENS, ignore_eos=True))).ttft_s


async def _closed_loop(client: Client, http: httpx.AsyncClient, admin_port: int, rows: int, seconds: float) -> tuple[float, float]:
    """Tokens a second that clients got whose requests end by themselves, and the device's busy share."""

    async def ask() -> None:
        while True:
            await client.ended(client.submit(PROMPT_TOKENS, CLOSED_LOOP_TOKENS, ignore_eos=False))

    tasks = [asyncio.create_task(ask()) for _ in range(rows)]
    await asyncio.sleep(WARM_UP_S)
    before, tokens_before, start = await counters(http, admin_port, "lockstep_worker_"), client.tokens, asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    tokens, end = client.tokens - tokens_before, asyncio.get_running_loop().time()
    after = await counters(http, admin_port, "lockstep_worker_")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.end_all()
    return tokens / (end - start), _busy(before, after)


def _busy(before: dict[str, float], after: dict[str, float]) -> float:
    busy, idle = (after[name] - before[name] for name in ("lockstep_worker_busy_seconds_total", "lockstep_worker_idle_seconds_total"))
    return busy / (busy + idle)


def _step_ms(before: dict[str, float], after: dict[str, float]) -> float:
    total, count = (after[name] - before[name] for name in ("lockstep_worker_step_seconds_sum", "lockstep_worker_step_seconds_count"))
    return total / count * 1e3


async def _control(port: int, rows: int, stream: int, seconds: float) -> float:
    """The busy share of a device whose plans are always there: of decode steps, with CONTROL_QUEUE_US of them queued."""
    outbox: Outbox[pb.ExecutionExecuteRequest] = Outbox(lambda: pb.ExecutionExecuteRequest(heartbeat=pb.ExecuteHeartbeat()))
    hello = pb.ExecuteHello(protocol_version=PROTOCOL_VERSION, group="group-0", epoch=1, stream=stream)
    outbox.put(pb.ExecutionExecuteRequest(hello=hello))
    slots = np.arange(rows, dtype=np.int32)
    flags = np.full(rows, RowFlag.SAMPLE, dtype=np.int32)
    lead = Lead(overlap=True)  # for its bursts
    plan_id = queued_us = first_us = busy_us = 0
    last: pb.PlanResult | None = None
    async with connected(port) as opened:
        call = ExecutionStub(opened).Execute(aiter(outbox))
        async for message in received(aiter(call), "the worker"):
            match message.WhichOneof("message"):
                case "welcome":
                    for chunk in np.array_split(slots, -(-rows * PROMPT_TOKENS // MAX_STEP_TOKENS)):
                        plan_id += 1
                        outbox.put(pb.ExecutionExecuteRequest(plan=encode(_prefill(plan_id, chunk))))
                case "result":
                    result, prefills = message.result, -(-rows * PROMPT_TOKENS // MAX_STEP_TOKENS)
                    if result.plan < prefills:
                        continue
                    step_us = (result.end_us - result.start_us) // result.iterations
                    queued_us -= step_us * result.iterations if result.plan > prefills else 0
                    while queued_us < CONTROL_QUEUE_US:
                        plan_id += 1
                        plan = Plan(plan_id, iterations=lead.burst(step_us), decode_slots=slots, decode_flags=flags)
                        outbox.put(pb.ExecutionExecuteRequest(plan=encode(plan)))
                        queued_us += step_us * plan.iterations
                    if last is None and result.plan > prefills + CONTROL_QUEUE_US // step_us:
                        first_us, last = result.start_us, result
                    if last is not None:
                        busy_us, last = busy_us + step_us * result.iterations, result
                        if last.end_us - first_us > seconds * 1e6:
                            break
        call.cancel()
    assert last is not None  # the loop ends by it
    return busy_us / (last.end_us - first_us)


def _prefill(plan_id: int, slots: np.ndarray) -> Plan:
    """Rows in pages of their own."""
    count, pages = len(slots), CONTROL_TOKENS // PAGE_SIZE
    admissions = np.zeros(count, dtype=ADMISSION)
    admissions["slot"], admissions["epoch"], admissions["max_length"] = slots, 1, CONTROL_TOKENS
    admissions["flags"], admissions["top_p"], admissions["stop_ids"] = SlotFlag.IGNORE_EOS, 1.0, NO_STOP_ID
    ones = np.ones(count, dtype=np.int32)
    return Plan(
        plan_id,
        prefill_slots=slots,
        prefill_starts=0 * ones,
        prefill_lengths=PROMPT_TOKENS * ones,
        prefill_flags=int(RowFlag.SAMPLE) * ones,
        prefill_ids=np.arange(count * PROMPT_TOKENS, dtype=np.int32) % 1000 + 3,
        grant_slots=np.repeat(slots, pages),
        grant_indexes=np.tile(np.arange(pages, dtype=np.int32), count),
        grant_pages=(slots[:, None] * pages + np.arange(pages, dtype=np.int32) + 1).ravel().astype(np.int32),
        admissions=admissions,
    )


def _report(
    measured: dict[Cell, list[Measured]],
    models: Sequence[str],
    rows: Sequence[int],
    delays_ms: Sequence[float],
    repeats: int,
    seconds: float,
) -> Report:
    """Each figure is the median of its own repeats; relative ones compare the medians."""
    table: list[tuple[str | int | float, ...]] = []
    busy_series, ttft_series = [], []
    for model in models:
        for count in rows:
            zero = _medians(measured[Cell(model, count, round(delays_ms[0] * 1e3))])
            relative, growth = [], []
            for delay_ms in delays_ms:
                figures = _medians(measured[Cell(model, count, round(delay_ms * 1e3))])
                relative.append(figures.busy / zero.busy * 100)
                growth.append(figures.ttft_ms - zero.ttft_ms)
                allowed = 1.2 * 2 * delay_ms + 2 * figures.step_ms
                table.append(
                    (
                        *(model, count, delay_ms, figures.step_ms, figures.busy * 100, relative[-1], figures.control * 100),
                        *(figures.ttft_ms, growth[-1], allowed, figures.useful_tokens_s),
                        figures.useful_tokens_s / zero.useful_tokens_s * 100,
                    )
                )
            busy_series.append(Series(f"{model}, {count} rows", delays_ms, relative))
            ttft_series.append(Series(f"{model}, {count} rows", delays_ms, growth))
    return Report(
        name="distance",
        columns=(
            *("model", "rows", "ms each way", "step ms", "busy %", "of zero delay %", "control busy %"),
            *("TTFT ms", "growth ms", "allowed ms", "useful tok/s", "of zero delay %"),
        ),
        rows=table,
        notes=(
            f"simulated H200; medians of {repeats} runs of {seconds:g} s a cell; newcomers have {PROMPT_TOKENS} prompt tokens",
            "allowed: 1.2 round trips of the proxy's delay and 2 step times; control: 160 ms of plans queued at the worker",
            f"useful tok/s: requests that end by themselves after {MEAN_TOKENS} tokens on average, each followed by another at once",
        ),
        plots=(
            Plot("Device busy, relative to no delay", "delay each way, ms", "%", busy_series),
            Plot("Growth of the time to first token", "delay each way, ms", "ms", ttft_series),
        ),
        raw={f"{cell.model}, {cell.rows} rows, {cell.delay_us} us": [each._asdict() for each in found] for cell, found in measured.items()},
    )


def _medians(found: list[Measured]) -> Measured:
    return Measured(*(median(values) for values in zip(*found, strict=True)))
