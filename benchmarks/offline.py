"""The offline task, through the services: many prompts at once, each with its own number of new tokens; output tokens a second."""

from collections.abc import Sequence
from statistics import median

from benchmarks.floors import offline_s
from benchmarks.report import Value
from benchmarks.served import Served
from benchmarks.workload import offline_task

COLUMNS = ("model", "prompts", "new tokens", "s", "spread", "tokens/s", "floor", "of the floor", "best peer", "ours / peer", "device busy")
PEERS_CASE = (256, 100, 1024)
TEMPERATURE = 0.6


def measure_offline(served: Served, prompts: int, least: int, most: int, repeats: int, raw: dict[str, object]) -> list[Sequence[Value]]:
    """One line; lengths of prompts and completions are uniform in `[least, most]`."""
    if served.over:
        return [(served.name, prompts, *[None] * (len(COLUMNS) - 2))]
    tasks = [offline_task(prompts, least, most, served.llm.vocab_size, run) for run in range(repeats)]
    before = served.steps()
    times = [served.timed(task.prompts, task.max_tokens, TEMPERATURE) for task in tasks]
    after = served.steps()
    raw[f"{served.name} offline"] = times
    seconds, tokens = median(times), tasks[0].output_tokens
    floor = tokens / offline_s(served.shape, tasks[0], served.ceilings)
    peer = served.peers.offline_tokens_per_s if served.peers and (prompts, least, most) == PEERS_CASE else None
    print(f"{served.name}: {tokens / seconds:,.0f} tokens/s offline", flush=True)
    return [
        (
            served.name,
            prompts,
            tokens,
            seconds,
            f"{(max(times) - min(times)) / seconds:.1%}",
            tokens / seconds,
            floor,
            f"{tokens / seconds / floor:.0%}",
            peer,
            tokens / seconds / peer if peer else None,
            f"{(after.busy_s - before.busy_s) / sum(times):.1%}",
        )
    ]
