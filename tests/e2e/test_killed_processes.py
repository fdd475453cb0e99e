"""SIGKILL to any process, and nobody takes over: the others notice and say so in a line, clients get an error in time, nothing hangs and
nobody is left behind. One stack for all: after each test, what has ended is started again.
"""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually

ENDLESS = {"step_s": 0.05, "default": {"ids": [40, 41, 42], "repeat": True}}  # 240 tokens take 12 s
ERROR_WITHIN_S = 5.0
TOLD = {  # victim -> service -> words of a line of its log
    "rank0": {"worker": r"rank 0 ended by SIGKILL"},
    "rank1": {"worker": r"rank 1 ended by SIGKILL", "scheduler": r"rank 1 ended by SIGKILL"},
    "worker": {"scheduler": r"group group-0: the worker: unavailable"},
    "scheduler": {"worker": r"the scheduler has gone", "gateway": r"no session with the scheduler"},
    "gateway": {"scheduler": r"session \d+ has ended"},
}


class Call(threading.Thread):
    """A whole, not streamed answer, asked for in a thread."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._client, self._model = stack.openai, stack.names[0]
        self.error: Exception | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._client.completions.create(model=self._model, prompt="hi", max_tokens=240, extra_body={"ignore_eos": True})
        except openai.OpenAIError as error:
            self.error = error
        self.ended_at = time.monotonic()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, weightless_model: Path) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("stack"),
        model=weightless_model,
        engine="scripted",
        tensor_parallel_size=2,
        script=ENDLESS,
        scheduler_args=["--group-wait-s", "1"],
        gateway_args=["--scheduler-wait-s", "1"],
    ) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    yield running
    for service in (running.worker, running.scheduler, running.gateway):
        if service.ended:
            service.start_again()
    eventually(lambda: running.groups_ready() == 1 and running.client.get("/health").is_success)


def kill(stack: Stack, victim: str) -> None:
    if victim.startswith("rank"):
        stack.ranks()[int(victim[-1])].kill()
    else:
        getattr(stack, victim).kill()


@pytest.mark.parametrize("victim", TOLD)
def test_clients_get_an_error_in_time_and_the_others_say_so_in_one_line(stack: Stack, victim: str) -> None:
    ranks, before = stack.ranks(), {service: len(getattr(stack, service).log) for service in TOLD[victim]}
    call = Call(stack)
    with stack.stream("hi", max_tokens=240, extra_body={"ignore_eos": True}) as stream:
        next(stream)
        kill(stack, victim)
        killed_at = time.monotonic()
        for service, words in TOLD[victim].items():
            lines = told(stack, service, words, before[service])
            assert len(lines) == 1, lines
        expected = httpx.RemoteProtocolError if victim == "gateway" else openai.APIError
        with pytest.raises((expected, openai.APIConnectionError)):
            list(stream)
        assert time.monotonic() - killed_at < ERROR_WITHIN_S
    call.join(ERROR_WITHIN_S)
    assert not call.is_alive()
    assert call.ended_at - killed_at < ERROR_WITHIN_S
    if victim == "gateway":
        assert isinstance(call.error, openai.APIConnectionError)
        eventually(lambda: stack.scheduler.metrics()["lockstep_num_requests_running"] == 0, ERROR_WITHIN_S)
    else:
        assert isinstance(call.error, openai.InternalServerError)
        assert call.error.status_code == 503
        assert call.error.response.headers["retry-after"]
    if victim == "worker" or victim.startswith("rank"):
        eventually(lambda: stack.worker.ended and not any(rank.is_running() for rank in ranks))
        eventually(lambda: others(stack) == {stack.scheduler.pid, stack.gateway.pid})


def told(stack: Stack, service: str, words: str, begin: int) -> list[str]:
    """The lines with these words in what a service has logged since, once there is one; no fault of ours is among the rest."""

    def since() -> str:
        return str(getattr(stack, service).log)[begin:]

    eventually(lambda: re.search(words, since()), ERROR_WITHIN_S)
    log = since()
    assert "Traceback" not in log
    return [line for line in log.splitlines() if re.search(words, line) and "not ready" not in line and "no worker group" not in line]


def others(stack: Stack) -> set[int]:
    """All that live, but for the processes in which the gateway renders templates: it starts them when it needs them."""
    renderers = psutil.Process(stack.gateway.pid).children(recursive=True)
    return {process.pid for process in stack.living()} - {process.pid for process in renderers}
