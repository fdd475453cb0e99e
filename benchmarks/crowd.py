"""What the host computes for prompts that come together: thread time of scheduler and worker from message to message, gRPC apart.

Warm, as under load, and cold, with nothing of it in the CPU's caches, as when a client asks after a pause.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import simulated_model
from benchmarks.report import Report, Value
from benchmarks.virtual import metrics
from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.scheduler.scheduler import Scheduler
from services.scheduler.session import GatewaySession
from services.scheduler.stream import step_result
from shared.protocol import execution_pb2, generation_pb2
from shared.protocol.plan import Limits, Plan, check, decode, encode, ids_to_bytes
from shared.protocol.submits import MAX_SUBMITS

CROWDS = ((1, 1024), (16, 1024), (MAX_SUBMITS, 64))  # (prompts, tokens of each)
COLD_BYTES = 1 << 26  # that are written in between: more than a core's caches hold
STEP_US = 30_000
SLOTS = 256


class Times(NamedTuple):
    """Of one crowd, in microseconds."""

    to_plan: float  # from the client's message to the scheduler's with the plan
    to_rank: float  # from that to the plan's bytes, checked by the supervisor
    to_client: float  # from the supervisor's message with the result to the scheduler's with the first tokens, which are the last


def crowd(repeats: int = 30) -> Report:
    """Prompts that nobody has asked before, of one new token each."""
    rows: list[tuple[Value, ...]] = []
    raw: dict[str, object] = {}
    for prompts, tokens in CROWDS:
        found = asyncio.run(_asked(_Host(prompts, tokens), repeats))
        raw |= {f"{prompts} x {tokens}, {'cold' if cold else 'warm'}": [each._asdict() for each in times] for cold, times in found.items()}
        medians = [map(median, zip(*found[cold], strict=True)) for cold in (False, True)]
        rows.append((prompts, tokens, *(value for pair in zip(*medians, strict=True) for value in pair)))
    return Report(
        name="crowd",
        columns=("prompts", "tokens", *(f"{name.replace('_', ' ')}, {how}" for name in Times._fields for how in ("warm", "cold"))),
        rows=rows,
        notes=(f"us of a thread, medians of {repeats}; to plan, to client: the scheduler's; to rank: the supervisor's",),
        raw=raw,
    )


async def _asked(host: "_Host", repeats: int) -> dict[bool, list[Times]]:
    """Of crowds that come warm and of those that come cold."""
    return {cold: [await host.ask(cold) for _ in range(repeats)] for cold in (False, True)}


class _Host:
    """A scheduler, one session, and a group whose plans nobody computes."""

    def __init__(self, prompts: int, tokens: int) -> None:
        self._prompts, self._tokens = prompts, tokens
        pages_of_prompt = -(-(tokens + 1) // 16)
        self._limits = Limits(SLOTS, 8 * prompts * pages_of_prompt, 16, 9_216, 16_384, simulated_model.VOCAB_SIZE)
        self._plans: list[execution_pb2.ExecutionExecuteRequest] = []
        self._later: list[Callable[[], object]] = []
        self._session = GatewaySession(1, "benchmark", time.monotonic)
        self._told = aiter(self._session.outbox)
        series = metrics()
        scheduler = Scheduler(10**6, 10**9, 30.0, self._deliver, series, time.monotonic(), later=self._later.append)
        scheduler.model = simulated_model.model(self._limits.max_length)
        self._scheduler = scheduler
        self._group = Group(
            "group-0",
            self._limits,
            0,
            self._limits.max_step_tokens,
            True,
            self._send,
            scheduler.deliver,
            series.engine("group-0"),
            wake=lambda after_s: self._later.append(lambda: self._group.on_time(time.monotonic())),
        )
        scheduler.add_group(self._group, time.monotonic())
        self._messages = self._crowds()

    async def ask(self, cold: bool) -> Times:
        """One crowd, from its arrival until its books are closed."""
        submits, begin = next(self._messages), _begin(cold)
        request = generation_pb2.GenerationSessionRequest.FromString(submits)
        self._scheduler.submit_all(request.submits.submits, 1, time.monotonic())
        (message,) = self._plans
        sent = message.SerializeToString()
        to_plan, begin = _since(begin), _begin(cold)
        plan = decode(execution_pb2.ExecutionExecuteRequest.FromString(sent).plan)
        check(plan, self._limits)
        to_rank, result = _since(begin), _result(plan)
        begin = _begin(cold)
        answer = execution_pb2.ExecutionExecuteResponse.FromString(result)
        self._scheduler.on_result(self._group, step_result(answer.result), time.monotonic())
        (await anext(self._told)).SerializeToString()
        to_client = _since(begin)
        self._plans.clear()
        while self._later:
            self._later.pop(0)()
        return Times(to_plan, to_rank, to_client)

    def _send(self, plan: Plan) -> None:
        self._plans.append(execution_pb2.ExecutionExecuteRequest(plan=encode(plan)))

    def _deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            self._session.update(request)
        self._session.flush()

    def _crowds(self) -> Iterator[bytes]:
        """Messages that ask for prompts which were not there before."""
        random, number = np.random.default_rng(0), 0
        while True:
            message = generation_pb2.GenerationSessionRequest()
            for _ in range(self._prompts):
                number += 1
                message.submits.submits.append(simulated_model.submit(number, simulated_model.random_ids(random, self._tokens), 1))
            yield message.SerializeToString()


def _begin(cold: bool) -> int:
    """Nanoseconds of this thread, after the caches are as they should be."""
    if cold:
        np.ones(COLD_BYTES, dtype=np.uint8).sum()
    return time.thread_time_ns()


def _since(begin: int) -> float:
    return (time.thread_time_ns() - begin) / 1e3


def _result(plan: Plan) -> bytes:
    """What a supervisor answers: a token for each row."""
    now_us = time.monotonic_ns() // 1000
    result = execution_pb2.PlanResult(
        plan=plan.plan_id,
        epoch=1,
        stream=1,
        iterations=1,
        ids=ids_to_bytes(np.full(plan.rows, simulated_model.EOS, dtype=np.int32)),
        slot_epochs=ids_to_bytes(plan.admissions["epoch"].astype(np.int32)),
        hold_us=STEP_US,
        start_us=now_us - STEP_US,
        end_us=now_us,
    )
    return execution_pb2.ExecutionExecuteResponse(result=result).SerializeToString()
