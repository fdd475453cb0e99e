"""What the services cost: time per token at batch 1 through HTTP against the same engine stepped in this process."""

import json
import time
from pathlib import Path
from statistics import median

import httpx
import numpy as np
from rich.progress import track

from benchmarks.report import Plot, Report, Series
from benchmarks.stack import RunningStack, stack
from services.worker.engine.engine import TorchEngine
from services.worker.engine.interface import RankSpec
from shared.protocol.plan import ADMISSION, NO_STOP_ID, Plan, RowFlag, SlotFlag, decode, encode

PAGE_SIZE = 16
PROMPT = list(range(1000, 1032))


def overhead(pairs: int = 5, tokens: int = 64) -> Report:
    """The demo model, engine on one thread; alternating pairs, so that a slow minute of the machine slows both."""
    with stack("--threads", "1") as running:
        engine = _engine(running.model_folder)
        through_http(running, tokens)
        in_process(engine, tokens)  # once each to warm up
        served, stepped = [], []
        for _ in track(range(pairs), description="overhead"):
            served.append(through_http(running, tokens))
            stepped.append(in_process(engine, tokens))
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


def in_process(engine: TorchEngine, tokens: int) -> float:
    """Seconds per token of the same completion by plans executed one after the other."""
    length = len(PROMPT) + tokens
    pages = np.arange(-(-length // PAGE_SIZE), dtype=np.int32)
    admission = np.zeros(1, dtype=ADMISSION)
    admission["max_length"], admission["flags"], admission["top_p"], admission["stop_ids"] = length, SlotFlag.IGNORE_EOS, 1.0, NO_STOP_ID
    zero = np.zeros(1, dtype=np.int32)
    sample = np.full(1, RowFlag.SAMPLE, dtype=np.int32)
    prefill = Plan(
        0,
        prefill_slots=zero,
        prefill_starts=zero,
        prefill_lengths=np.array([len(PROMPT)], dtype=np.int32),
        prefill_flags=sample,
        prefill_ids=np.array(PROMPT, dtype=np.int32),
        grant_slots=np.zeros_like(pages),
        grant_indexes=pages,
        grant_pages=pages + 1,
        admissions=admission,
    )
    plans = [prefill, *(Plan(number, decode_slots=zero, decode_flags=sample) for number in range(1, tokens))]
    start = time.perf_counter()
    for plan in plans:
        words = np.frombuffer(bytearray(encode(plan)), dtype=np.int32)
        engine.begin(decode(words.data.cast("B")), words).run()
    return (time.perf_counter() - start) / tokens


def _engine(model: Path) -> TorchEngine:
    spec = RankSpec(
        rank=0,
        ranks=1,
        parent_pid=0,
        engine="torch",
        model=model,
        script=None,
        dtype="auto",
        max_model_len=None,
        page_size=PAGE_SIZE,
        num_pages=64,
        kv_cache_memory_bytes=1 << 30,
        slots=64,
        threads=1,
        rendezvous="",
        ring_fd=-1,
        bell_fd=-1,
        socket_fd=-1,
    )
    return TorchEngine(spec, lambda phase, part: None)
