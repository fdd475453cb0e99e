"""Prefill: the time until the first token of prompts that came together and that nobody has asked before, through the services."""

from collections.abc import Sequence
from statistics import median

from benchmarks.floors import prefill_operations
from benchmarks.report import Value
from benchmarks.served import Served, Way
from benchmarks.workload import fresh

# "of the device": of the milliseconds, in which it computed, in so many steps; "host": in which it did not
COLUMNS = (
    *("model", "prompts", "tokens", "ms", "spread", "of the device", "host ms", "steps"),
    *("TFLOP/s", "of a burst", "of sustained", "best peer ms", "peer / ours"),
)
PEERS_CASE = (16, 1024)
SEED = 100


def measure_prefill(served: Served, prompts: int, length: int, repeats: int, raw: dict[str, object]) -> list[Sequence[Value]]:
    """One line."""
    if served.over:
        return [(served.name, prompts, length, *[None] * (len(COLUMNS) - 3))]
    asked = [fresh([length] * prompts, served.llm.vocab_size, SEED + number) for number in range(repeats + 1)]
    served.timed(asked.pop(), 1)
    before = served.steps()
    times, ways = [], []
    for each in asked:
        times.append(served.timed(each, 1))
        ways.append(served.way())
    after = served.steps()
    raw[f"{served.name} prefill"] = times
    launch_ms = 1e3 * (after.prefill_launch_s - before.prefill_launch_s) / repeats
    if known := [way for way in ways if way is not None]:
        middle = Way(*map(median, zip(*known, strict=True)))
        print(f"{served.name}: of a prefill's ms: {middle}; of these in the rank, the host launches for {launch_ms:.2f}", flush=True)
        raw[f"{served.name} prefill's way"] = [way._asdict() for way in known]
    seconds, ceilings = median(times), served.ceilings
    device_ms = 1e3 * (after.prefill_s - before.prefill_s) / repeats
    rate = prefill_operations(served.shape, [length] * prompts) / seconds
    peer_ms = served.peers.prefill_ms if served.peers and (prompts, length) == PEERS_CASE else None
    print(f"{served.name}: {prompts} prompts of {length} tokens are prefilled in {1e3 * seconds:.1f} ms", flush=True)
    return [
        (
            served.name,
            prompts,
            length,
            1e3 * seconds,
            f"{(max(times) - min(times)) / seconds:.1%}",
            device_ms,
            1e3 * seconds - device_ms,
            (after.prefills - before.prefills) / repeats,
            rate / 1e12,
            f"{rate / ceilings.matrix:.0%}",
            f"{rate / ceilings.sustained:.0%}",
            peer_ms,
            peer_ms / 1e3 / seconds if peer_ms else None,
        )
    ]
