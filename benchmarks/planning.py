"""What a plan and its result cost the scheduler: thread time of its core, gRPC apart, by the number of running requests."""

import time
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import simulated_model
from benchmarks.report import Plot, Report, Series
from benchmarks.virtual import Clock, VirtualWorker, metrics
from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.scheduler.steps import StepResult
from services.scheduler.validation import to_request
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import SimulatedDevice
from shared.protocol.plan import Limits, Plan, encode

ROWS = (1, 64, 256, 1024)
ALLOWED_US, ALLOWED_US_PER_ROW = 200, 1
SHORT_SLOTS, SHORT_PAGES = 64, 400
MEAN_TOKENS = 300
PROMPT_TOKENS = 64
MAX_TOKENS = 1_200


class Cost(NamedTuple):
    """On average."""

    us: float  # of a result and the plans that follow from it, by their number
    rows: float  # of a plan


class _Timed(Group):
    """Notes the thread time of each result, with the plans that follow from it, and of the requests taken in between."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.spent_us = 0.0

    def on_result(self, result: StepResult, now: float) -> bool:
        start = time.thread_time_ns()
        has_token = super().on_result(result, now)
        self.spent_us += (time.thread_time_ns() - start) / 1e3
        return has_token


def planning(plans: int, repeats: int) -> Report:
    """Requests that end after 300 tokens on average, each followed by another; 1 ms each way. Then the same with too few pages."""
    measured = {rows: [_cost(rows, plans).us for _ in range(repeats)] for rows in ROWS}
    allowed = {rows: ALLOWED_US + ALLOWED_US_PER_ROW * rows for rows in ROWS}
    short = [_cost(SHORT_SLOTS, plans, SHORT_PAGES) for _ in range(repeats)]
    short_rows = median(cost.rows for cost in short)
    return Report(
        name="planning",
        columns=("rows", "us a plan and result", "allowed us"),
        rows=[
            *((rows, median(measured[rows]), allowed[rows]) for rows in ROWS),
            (short_rows, median(cost.us for cost in short), ALLOWED_US + ALLOWED_US_PER_ROW * short_rows),
        ],
        notes=(
            f"thread time, the plan's encoding included, gRPC apart; medians of {repeats} runs of {plans} plans",
            f"the last row: {SHORT_SLOTS} slots and {SHORT_PAGES} pages, so that requests wait, pause and are preempted",
        ),
        plots=[
            Plot(
                "Scheduling cost of a step",
                "running requests",
                "us",
                [Series("measured", ROWS, [median(measured[rows]) for rows in ROWS]), Series("allowed", ROWS, list(allowed.values()))],
            )
        ],
        raw={str(rows): values for rows, values in measured.items()} | {"short of pages": [cost.us for cost in short]},
    )


def _cost(slots: int, plans: int, pages: int | None = None) -> Cost:
    """pages: None for as many as all requests could ever need."""
    pages = slots * 80 + 1_000 if pages is None else pages
    vocab_size = simulated_model.VOCAB_SIZE
    limits = Limits(slots=slots, pages=pages, page_size=16, max_length=2_000, max_step_tokens=2_048, vocab_size=vocab_size)
    clock = Clock()
    model = simulated_model.model(limits.max_length)
    device = SimulatedDevice(limits, simulated_model.language(MEAN_TOKENS), Roofline(GPUS["h200"], MODELS["8b"]))
    worker = VirtualWorker(clock, device, delay_us=1_000)
    submitted, sent_rows, random = 0, 0, np.random.default_rng(0)

    def submit() -> None:
        nonlocal submitted
        submitted += 1
        message = simulated_model.submit(submitted, simulated_model.random_ids(random, PROMPT_TOKENS), MAX_TOKENS)
        group.submit(to_request(message, 1, model, clock.now_s), clock.now_s)

    def deliver(updated: list[Request], now: float) -> None:
        for request in updated:
            if request.end is not None:
                clock.after(0, submit)

    def send(plan: Plan) -> None:
        nonlocal sent_rows
        encode(plan)
        sent_rows += plan.rows
        worker.send(plan)

    group = worker.group = _Timed("group-0", limits, 0, limits.max_step_tokens, True, send, deliver, metrics().engine("group-0"))
    for _ in range(slots):
        submit()
    clock.run(3_000_000)  # lengths have spread
    before, spent_us, sent_rows = worker.plans, group.spent_us, 0
    while worker.plans - before < plans:
        clock.run(clock.now_us + 100_000)
    return Cost((group.spent_us - spent_us) / (worker.plans - before), sent_rows / (worker.plans - before))
