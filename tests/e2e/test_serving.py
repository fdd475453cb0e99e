"""The whole path, from a client through three processes and back."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually

SLOW_FOREVER = {"step_s": 0.02, "default": {"ids": [40, 41, 42, 43], "repeat": True}}  # F G H I
ERROR_WITHIN_S = 5.0


def test_random_weights_answer_alike_streamed_and_whole(start_stack: Callable[..., Stack], tiny_model: Path) -> None:
    stack = start_stack(model=tiny_model, tensor_parallel_size=2)
    whole = stack.complete("Once upon a time", max_tokens=40, temperature=0)
    with stack.stream("Once upon a time", max_tokens=40, temperature=0) as stream:
        assert "".join(stream) == whole
    assert len(stack.ranks()) == 2
    assert isinstance(stack.chat("hello", max_tokens=8), str)


@pytest.mark.parametrize("victim", ["rank", "worker", "scheduler"])
def test_an_open_stream_gets_an_error_when_a_process_dies_and_does_not_come_back(
    start_stack: Callable[..., Stack], weightless_model: Path, victim: str
) -> None:
    stack = start_stack(
        model=weightless_model,
        engine="scripted",
        script=SLOW_FOREVER,
        scheduler_args=["--group-wait-s", "0.5"],
        gateway_args=["--scheduler-wait-s", "0.5"],
    )
    with stack.stream("hi", max_tokens=240) as stream:
        assert "".join(itertools.islice(stream, 4)).startswith("F")
        (stack.ranks()[0] if victim == "rank" else getattr(stack, victim)).kill()
        killed_s = time.monotonic()
        with pytest.raises(openai.APIError):
            list(stream)
        assert time.monotonic() - killed_s < ERROR_WITHIN_S


@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_worker_leaves_no_rank_behind(start_stack: Callable[..., Stack], weightless_model: Path, victim: str) -> None:
    stack = start_stack(model=weightless_model, engine="scripted", tensor_parallel_size=2)
    ranks = stack.ranks()
    (ranks[1] if victim == "rank" else stack.worker).kill()
    eventually(lambda: stack.worker.ended and not any(rank.is_running() for rank in ranks))

    def others() -> set[int]:
        """All that live, but for the processes in which the gateway renders templates: it starts them when it needs them."""
        renderers = psutil.Process(stack.gateway.pid).children(recursive=True)
        return {process.pid for process in stack.living()} - {process.pid for process in renderers}

    eventually(lambda: others() == {stack.scheduler.pid, stack.gateway.pid})
