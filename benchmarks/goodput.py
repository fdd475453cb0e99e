"""What policies make of conversations with shared beginnings, and what the prefix cache finds beside the same cache replayed by itself."""

from collections.abc import Callable, Sequence

import numpy as np
from rich.progress import track

from benchmarks.conversations import GAP_S, PAGE_SIZE, TPOT_S, TTFT_S, Measured, Setup, Traffic, converse, replayed_hit_rate
from benchmarks.report import Plot, Report, Series
from services.scheduler.policy import PolicyName


def goodput(rates: Sequence[float], policies: Sequence[PolicyName], seconds: float) -> Report:
    """Every policy at every rate of new conversations."""
    runs = [(policy, rate) for policy in policies for rate in rates]
    found = {run: converse(Traffic(run[1]), Setup(run[0]), seconds) for run in track(runs, description="goodput", transient=True)}
    setup, traffic = Setup(), Traffic(0)

    def series(value: Callable[[Measured], float]) -> list[Series]:
        return [Series(policy, rates, [value(found[policy, rate]) for rate in rates]) for policy in policies]

    return Report(
        name="goodput",
        columns=(
            *("policy", "conversations/s", "requests/s", "good requests/s", "TTFT p50 ms", "TTFT p95 ms", "gap p50 ms", "gap p99 ms"),
            *("full step ms", "gap p99 / step", "hit rate %", "replayed %"),
        ),
        rows=[
            (
                *(policy, rate, len(measured.ttft_s) / measured.seconds, measured.goodput),
                *(float(np.quantile(measured.ttft_s, quantile)) * 1e3 for quantile in (0.5, 0.95)),
                *(measured.gap_s(quantile) * 1e3 for quantile in (0.5, 0.99)),
                *(measured.full_step_s * 1e3, measured.gap_s(0.99) / measured.full_step_s),
                *(measured.hit_rate * 100, replayed_hit_rate(measured.events, setup.pages) * 100),
            )
            for (policy, rate), measured in found.items()
        ],
        notes=(
            f"{setup.model} on a simulated {setup.gpu}, {setup.slots} slots, {setup.pages} pages of {PAGE_SIZE} tokens, "
            f"steps up to {setup.max_step_tokens}; runs of {seconds:g} s of virtual time",
            f"good: first token within {TTFT_S * 1e3:g} ms, then {TPOT_S * 1e3:g} ms a token on average and no gap over {GAP_S * 1e3:g} ms",
            f"conversations of {traffic.turns:g} turns on average after one of {traffic.systems} system prompts of {traffic.system_tokens} "
            f"tokens, {traffic.user_tokens} tokens a turn and {traffic.answer_tokens} an answer",
        ),
        plots=(
            Plot("Goodput", "new conversations a second", "good requests a second", series(lambda measured: measured.goodput)),
            Plot(
                "Gap between tokens, 99th percentile",
                "new conversations a second",
                "ms",
                series(lambda measured: measured.gap_s(0.99) * 1e3),
            ),
        ),
    )
