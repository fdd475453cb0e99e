"""How much of a scheduler a fleet takes: many simulated groups in one worker process, and one scheduler, over real gRPC.

Steps last about 50 ms (a 14B model on an L40S), so every group should make 20 a second. If the scheduler cannot keep up, groups idle.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import NamedTuple

import httpx
import uvloop

from benchmarks.report import Report
from benchmarks.simulation import counters, model_folder, service, session

GPU, MODEL = "l40s", "14b"
PROMPT_TOKENS = 64
MOST_TOKENS = 1_100  # that a request may have, so that its slot's pages are there
START_S = 120.0  # for all requests to run

STEPS, BUSY, IDLE = "lockstep_worker_step_seconds_count", "lockstep_worker_busy_seconds_total", "lockstep_worker_idle_seconds_total"
RUNNING = "lockstep_num_requests_running"
CPU, PLANNED, PLANNING = "process_cpu_seconds_total", "lockstep_scheduler_planning_seconds_count", "lockstep_scheduler_planning_seconds_sum"


class Reading(NamedTuple):
    at_s: float
    worker: dict[str, float]
    scheduler: dict[str, float]
    tokens: int  # that the client has got


def fleet(groups: int, rows: int, seconds: float) -> Report:
    """Every group decodes `rows` requests at a time."""
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        engine = ("--engine", "simulated", "--groups", str(groups), "--simulated-gpu", GPU, "--simulated-model", MODEL)
        sizes = ("--max-num-seqs", str(rows), "--simulated-mean-tokens", "0")
        with (
            service("worker", "--model", str(model_folder(Path(folder))), *engine, *sizes) as worker,
            service("scheduler", "--worker", f"127.0.0.1:{worker['grpc']}", "--max-waiting-requests", str(groups * rows)) as scheduler,
        ):
            before, after = uvloop.run(_load(worker["admin"], scheduler, groups * rows, seconds))
    took_s = after.at_s - before.at_s

    def grown(name: str) -> float:
        old, new = (reading.scheduler | reading.worker if name != CPU else reading.scheduler for reading in (before, after))
        return new[name] - old[name]

    busy = grown(BUSY) / (grown(BUSY) + grown(IDLE))
    return Report(
        name="fleet",
        columns=("groups", "rows", "steps/s a group", "tokens/s", "busy %", "scheduler CPU %", "us a result and plan"),
        rows=[
            (
                *(groups, rows, grown(STEPS) / took_s / groups, (after.tokens - before.tokens) / took_s),
                *(busy * 100, grown(CPU) / took_s * 100, grown(PLANNING) / grown(PLANNED) * 1e6),
            )
        ],
        notes=(
            f"{groups} groups of one process: {MODEL} on simulated {GPU}s; {seconds:g} s; the scheduler's CPU with gRPC, of one core",
            "us a result and plan: of the thread, for what a result leads to",
        ),
    )


async def _load(worker_port: int, scheduler: dict[str, int], requests: int, seconds: float) -> tuple[Reading, Reading]:
    async with session(scheduler["grpc"]) as client, httpx.AsyncClient(trust_env=False) as http:
        for _ in range(requests):
            client.submit(PROMPT_TOKENS, MOST_TOKENS, ignore_eos=True)
            await asyncio.sleep(0)

        async def read() -> Reading:
            own = await counters(http, scheduler["admin"], CPU, PLANNED, PLANNING)
            return Reading(asyncio.get_running_loop().time(), await counters(http, worker_port, STEPS, BUSY, IDLE), own, client.tokens)

        async with asyncio.timeout(START_S):
            while (await counters(http, scheduler["admin"], RUNNING))[RUNNING] < requests:
                await asyncio.sleep(0.2)
        before = await read()
        await asyncio.sleep(seconds)
        return before, await read()
