"""What the gateway adds to a token, and whether its event loop stalls, while a scripted engine plays to many streams."""

import asyncio
import json
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import Report
from benchmarks.stack import RunningStack, scripted_stack

STEP_S = 0.001
LARGE_PROMPT_BYTES = 2 << 20
LARGE_PROMPTS = 5  # one after the other
MAX_LENGTH = 300_000  # fewer tokens than such a prompt has, which only tokenising can tell
DELAY = "lockstep_gateway_token_delay_seconds"
LAG = "lockstep_event_loop_lag_seconds"

Histogram = dict[float, float]  # upper bound to cumulative count


def gateway(streams: int, tokens: int) -> Report:
    """`streams` at once from an engine of 1 ms steps; then the same while prompts of 2 MB are tokenised beside them."""
    script = {"step_s": STEP_S, "default": {"ids": [40, 41, 42, 43], "repeat": True}}
    rows = []
    with scripted_stack(script, MAX_LENGTH) as running:
        asyncio.run(_load(running, 4, 100, large_prompts=0))  # warm-up
        for label, large_prompts in (("streams alone", 0), ("with 2 MB prompts", LARGE_PROMPTS)):
            before = histograms(running)
            elapsed = asyncio.run(_load(running, streams, tokens, large_prompts))
            after = histograms(running)
            delay, lag = (difference(after[name], before[name]) for name in (DELAY, LAG))
            rows.append(
                (
                    label,
                    streams * tokens / elapsed,
                    quantile(delay, 0.5) * 1e3,
                    quantile(delay, 0.99) * 1e3,
                    quantile(lag, 0.99) * 1e3,
                    int(lag[float("inf")] - lag[0.05]),
                )
            )
    return Report(
        name="gateway",
        columns=("load", "tokens/s", "delay p50, ms", "delay p99, ms", "loop lag p99, ms", "stalls over 50 ms"),
        rows=rows,
        notes=(
            f"{streams} streams of {tokens} tokens, scripted engine, {STEP_S * 1e3:g} ms a step; all processes share the cores.",
            f"delay: {DELAY}; lag: {LAG}; quantiles interpolated within buckets.",
        ),
    )


async def _load(running: RunningStack, streams: int, tokens: int, large_prompts: int) -> float:
    """Seconds until all streams have ended."""
    limits = httpx.Limits(max_connections=streams + large_prompts)
    async with httpx.AsyncClient(base_url=running.url, timeout=600, limits=limits) as client:
        start = asyncio.get_running_loop().time()
        work = [asyncio.create_task(_stream(client, running.model, tokens)) for _ in range(streams)]
        for _ in range(large_prompts):
            answer = await client.post(
                "/v1/completions", json={"model": running.model, "prompt": "lock step " * (LARGE_PROMPT_BYTES // 10)}
            )
            if answer.status_code != httpx.codes.BAD_REQUEST:
                raise RuntimeError(f"a prompt of 2 MB was answered with {answer.status_code}: {answer.text[:200]}")
        await asyncio.gather(*work)
        return asyncio.get_running_loop().time() - start


async def _stream(client: httpx.AsyncClient, model: str, tokens: int) -> None:
    body = {
        "model": model,
        "prompt": "hi",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if '"prompt_tokens"' in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]
    if usage is None or usage["completion_tokens"] != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for, usage is {usage}")


def histograms(running: RunningStack) -> dict[str, Histogram]:
    """The gateway's, summed over their labels."""
    text = httpx.get(f"http://127.0.0.1:{running.admin_ports['gateway']}/metrics", timeout=60).raise_for_status().text
    found: dict[str, Histogram] = {DELAY: {}, LAG: {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name in found and sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                found[family.name][bound] = found[family.name].get(bound, 0.0) + sample.value
    return found


def difference(after: Histogram, before: Histogram) -> Histogram:
    return {bound: after[bound] - before[bound] for bound in sorted(after)}


def quantile(histogram: Histogram, share: float) -> float:
    """Interpolated within its bucket; the largest finite bound for what lies beyond."""
    wanted = share * histogram[float("inf")]
    previous = (0.0, 0.0)
    for (low, below), (high, upto) in pairwise([previous, *histogram.items()]):
        if upto >= wanted:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / max(upto - below, 1.0)
    raise ValueError("an empty histogram has no quantiles")
