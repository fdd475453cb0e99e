"""Short ways to the things that tests of the scheduler need."""

from array import array
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.requests import Key, Request, Sampling
from tests.services.scheduler.device import EOS

METRICS = SchedulerMetrics("test", vllm_names=False, registry=CollectorRegistry())


def make_request(number: int, prompt: list[int], max_tokens: int, *, output: tuple[int, ...] = (), **fields: Any) -> Request:
    defaults: dict[str, Any] = {"min_tokens": 0, "ignore_eos": False, "stop_ids": (), "attempt": 1}
    fields = defaults | fields
    return Request(
        key=Key(1, number),
        request_id=f"request-{number}",
        prompt_ids=np.array(prompt, dtype=np.int32),
        output=array("i", output),
        sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=number),
        max_tokens=max_tokens,
        ending_ids=frozenset(fields["stop_ids"]) | (frozenset() if fields["ignore_eos"] else {EOS}),
        **fields,
    )
