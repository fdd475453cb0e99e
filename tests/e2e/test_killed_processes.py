"""SIGKILL to any process, and nobody takes over: the others notice and say so in a line, clients get an error in time, nothing hangs."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually

ENDLESS = {"step_s": 0.01, "default": {"ids": [40, 41, 42], "repeat": True}}
ERROR_WITHIN_S = 5.0


class Call(threading.Thread):
    """A whole, not streamed answer, asked for in a thread."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self.error: Exception | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._stack.openai.completions.create(model=self._stack.names[0], prompt="hi", max_tokens=240, extra_body={"ignore_eos": True})
        except openai.OpenAIError as error:
            self.error = error
        self.ended_at = time.monotonic()


@pytest.fixture
def stack(start_stack: Callable[..., Stack], weightless_model: Path) -> Stack:
    return start_stack(
        model=weightless_model,
        engine="scripted",
        tensor_parallel_size=2,
        script=ENDLESS,
        scheduler_args=["--group-wait-s", "1"],
        gateway_args=["--scheduler-wait-s", "1"],
    )


def kill(stack: Stack, victim: str) -> None:
    if victim.startswith("rank"):
        stack.ranks()[int(victim[-1])].kill()
    else:
        getattr(stack, victim).kill()


@pytest.mark.parametrize("victim", ["rank0", "rank1", "worker", "scheduler", "gateway"])
def test_clients_get_an_error_in_time(stack: Stack, victim: str) -> None:
    call = Call(stack)
    with stack.stream("hi", max_tokens=240, extra_body={"ignore_eos": True}) as stream:
        next(stream)
        kill(stack, victim)
        killed_at = time.monotonic()
        expected = httpx.RemoteProtocolError if victim == "gateway" else openai.APIError
        with pytest.raises((expected, openai.APIConnectionError)):
            list(stream)
        assert time.monotonic() - killed_at < ERROR_WITHIN_S
    call.join(ERROR_WITHIN_S)
    assert not call.is_alive()
    assert call.ended_at - killed_at < ERROR_WITHIN_S
    if victim == "gateway":
        assert isinstance(call.error, openai.APIConnectionError)
    else:
        assert isinstance(call.error, openai.InternalServerError)
        assert call.error.status_code == 503
        assert call.error.response.headers["retry-after"]


@pytest.mark.parametrize(
    "victim, service, words",
    [
        ("rank1", "worker", "rank 1 ended by SIGKILL"),
        ("rank1", "scheduler", "rank 1 ended by SIGKILL"),
        ("worker", "scheduler", "group group-0: the worker: unavailable"),
        ("scheduler", "worker", "the scheduler has gone"),
        ("scheduler", "gateway", "no session with the scheduler"),
        ("gateway", "scheduler", "session 1 has ended"),
    ],
)
def test_the_others_say_so_in_one_line(stack: Stack, victim: str, service: str, words: str) -> None:
    with stack.stream("hi", max_tokens=240, extra_body={"ignore_eos": True}) as stream:
        next(stream)
        kill(stack, victim)
        log = getattr(stack, service).log_file
        eventually(lambda: words in log.read_text(), ERROR_WITHIN_S)
        (line,) = [
            line for line in log.read_text().splitlines() if words in line and "not ready" not in line and "no worker group" not in line
        ]
        assert "Traceback" not in log.read_text(), line


def test_a_killed_gateway_frees_its_requests_at_the_scheduler(stack: Stack) -> None:
    with stack.stream("hi", max_tokens=240, extra_body={"ignore_eos": True}) as stream:
        next(stream)
        stack.gateway.kill()
    eventually(lambda: stack.scheduler.metrics()["lockstep_num_requests_running"] == 0, ERROR_WITHIN_S)
