"""What the services cost: time per token at batch 1 through HTTP against the same engine stepped in this process."""

import json
import time
from pathlib import Path
from statistics import median

import httpx
from rich.progress import track

from benchmarks.driver import Driver, spec
from benchmarks.report import Plot, Report, Series
from benchmarks.stack import RunningStack, stack
from services.worker.engine.engine import TorchEngine
from shared.protocol.plan import SlotFlag

PAGE_SIZE = 16
PROMPT = list(range(1000, 1032))


def overhead(pairs: int, tokens: int) -> Report:
    """The demo model, engine on one thread; alternating pairs, so that a slow minute of the machine slows both."""
    with stack("--threads", "1") as running:
        driver = _driver(running.model_folder, tokens)
        through_http(running, tokens)
        in_process(driver, tokens)  # once each to warm up
        served, stepped = [], []
        for _ in track(range(pairs), description="overhead"):
            served.append(through_http(running, tokens))
            stepped.append(in_process(driver, tokens))
    ratios = [a / b for a, b in zip(served, stepped, strict=True)]
    rows = [(index + 1, a * 1e3, b * 1e3, ratio) for index, (a, b, ratio) in enumerate(zip(served, stepped, ratios, strict=True))]
    numbers = list(range(1, pairs + 1))
    return Report(
        name="overhead",
        columns=("pair", "through HTTP, ms/token", "in process, ms/token", "ratio"),
        rows=[*rows, ("median", median(served) * 1e3, median(stepped) * 1e3, median(ratios))],
        notes=(f"{running.model}, prompt of {len(PROMPT)} tokens, {tokens} new tokens, batch 1, one thread; from request to last token",),
        plots=[
            Plot(
                "Time per token at batch 1",
                "pair",
                "ms",
                [Series("through HTTP", numbers, [a * 1e3 for a in served]), Series("in process", numbers, [b * 1e3 for b in stepped])],
            )
        ],
        raw={"served_s": served, "stepped_s": stepped},
    )


def through_http(running: RunningStack, tokens: int) -> float:
    """Seconds per token of one streamed completion."""
    body = {"model": running.model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    start = time.perf_counter()
    usage = None
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: "))["usage"] or usage
    elapsed = time.perf_counter() - start
    if usage is None or usage["completion_tokens"] != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for, usage is {usage}")
    return elapsed / tokens


def in_process(driver: Driver, tokens: int) -> float:
    """Seconds per token of the same completion by plans executed one after the other."""
    start = time.perf_counter()
    driver.prefill(0, PROMPT, max_length=len(PROMPT) + tokens, flags=SlotFlag.IGNORE_EOS)
    for _ in range(tokens - 1):
        driver.decode(0)
    return (time.perf_counter() - start) / tokens


def _driver(model: Path, tokens: int) -> Driver:
    """One slot, with pages for the prompt and so many new tokens."""
    pages = -(-(len(PROMPT) + tokens) // PAGE_SIZE)
    engine = TorchEngine(spec(model, page_size=PAGE_SIZE, num_pages=1 + pages, slots=1), lambda phase, part: None)
    return Driver(engine, PAGE_SIZE, pages, slots=1)
