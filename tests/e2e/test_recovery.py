"""Streams outlive whatever computes and schedules them, token by token: the real engine, in its deterministic mode.

One stack for nearly all: two workers, two schedulers of which one waits, a gateway. Each test leaves it as it found it.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.stack import Service, Stack
from tests.processes import eventually

PROMPTS = ["Once upon a time", "What is the capital of France?", "hello", "The model had two layers"]
NEW_TOKENS = 200
WITHIN_S = 60.0  # a worker starts anew
OPTIONS = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "extra_body": {"ignore_eos": True}}


class Streams:
    """One stream for each prompt, read by a thread each; sampled with a seed, so that the position counts, too."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.texts = [""] * len(PROMPTS)
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._read, args=(index,), daemon=True) for index in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        try:
            with self._stack.stream(PROMPTS[index], seed=index, **OPTIONS) as pieces:
                for piece in pieces:
                    self.texts[index] += piece
        except openai.OpenAIError as error:
            self.errors.append(error)

    def begun(self) -> "Streams":
        """Once each has some text."""
        eventually(lambda: self.errors or all(self.texts))
        assert not self.errors
        assert all(thread.is_alive() for thread in self._threads), "too late to break anything"
        return self

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive(), "a stream hangs"
        assert not self.errors
        return self.texts


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("recovery"),
        model=tiny_model,
        workers=2,
        schedulers=2,
        worker_args=("--deterministic", "true", "--max-num-seqs", "8"),
    ) as running:
        eventually(lambda: running.groups_ready() == 2, WITHIN_S)
        yield running


@pytest.fixture(scope="module")
def expected(stack: Stack) -> list[str]:
    """What comes when nothing breaks."""
    return Streams(stack).end()


@pytest.fixture
def all_is_there(stack: Stack) -> Iterator[None]:
    """After each test."""
    yield
    for service in (*stack.workers, *stack.schedulers):
        if service.ended:
            service.start_again()
    eventually(lambda: sum(scheduler.leads for scheduler in stack.schedulers) == 1, WITHIN_S)
    eventually(lambda: stack.groups_ready() == 2, WITHIN_S)
    eventually(lambda: sum(stack.running()) == 0)


def serving(stack: Stack) -> Service:
    """A worker that computes something."""
    return stack.workers[next(number for number, running in enumerate(stack.running()) if running)]


def standby(stack: Stack) -> Service:
    (waiting,) = [scheduler for scheduler in stack.schedulers if scheduler is not stack.leader]
    return waiting


@pytest.mark.usefixtures("all_is_there")
def test_a_killed_worker_and_then_the_only_one_that_is_left(stack: Stack, expected: list[str]) -> None:
    streams = Streams(stack).begun()
    one = serving(stack)
    one.kill()
    assert streams.end() == expected
    (other,) = [worker for worker in stack.workers if worker is not one]
    streams = Streams(stack).begun()
    other.kill()
    other.start_again()
    assert streams.end() == expected
    assert stack.leader.metrics(cause="lost")["lockstep_scheduler_requests_moved_total"] >= len(PROMPTS)


@pytest.mark.usefixtures("all_is_there")
@pytest.mark.parametrize("how", [Service.kill, Service.terminate])
def test_the_standby_goes_on_when_the_leader_is_gone(stack: Stack, expected: list[str], how: Callable[[Service], None]) -> None:
    leader, waiting = stack.leader, standby(stack)
    streams = Streams(stack).begun()
    how(leader)
    assert streams.end() == expected
    assert stack.leader is waiting
    eventually(lambda: leader.ended)
    cause = "lost" if how is Service.kill else "moved"
    assert stack.gateway.metrics(cause=cause)["lockstep_gateway_resubmissions_total"] >= len(PROMPTS)
    assert leader.process.returncode == (-signal.SIGKILL if how is Service.kill else 0)


@pytest.mark.usefixtures("all_is_there")
@pytest.mark.parametrize("how", [Service.kill, Service.terminate])
def test_a_scheduler_without_a_standby_comes_back(stack: Stack, expected: list[str], how: Callable[[Service], None]) -> None:
    leader, waiting = stack.leader, standby(stack)
    waiting.terminate()
    eventually(lambda: waiting.ended)
    streams = Streams(stack).begun()
    how(leader)
    eventually(lambda: leader.ended)
    leader.start_again()
    assert streams.end() == expected


@pytest.mark.usefixtures("all_is_there")
def test_an_old_leader_that_wakes_up_does_no_harm_and_steps_down(stack: Stack, expected: list[str]) -> None:
    leader, waiting = stack.leader, standby(stack)
    streams = Streams(stack).begun()
    leader.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: waiting.leads, WITHIN_S)
        eventually(lambda: waiting.metrics()["lockstep_num_requests_running"])
    finally:
        leader.process.send_signal(signal.SIGCONT)
    eventually(lambda: leader.ended)
    assert leader.process.returncode == 1
    assert "leads now, with epoch" in leader.log.splitlines()[-1]
    assert streams.end() == expected


@pytest.mark.usefixtures("all_is_there")
def test_a_worker_and_the_leader_at_once(stack: Stack, expected: list[str]) -> None:
    leader = stack.leader
    streams = Streams(stack).begun()
    serving(stack).kill()
    leader.kill()
    assert streams.end() == expected


@pytest.mark.usefixtures("all_is_there")
def test_running_requests_leave_a_worker_that_drains(stack: Stack, expected: list[str]) -> None:
    lost = stack.leader.metrics(cause="lost")["lockstep_scheduler_requests_moved_total"]
    worker = stack.workers[0]  # each has some of them
    streams = Streams(stack).begun()
    worker.terminate()
    assert streams.end() == expected
    eventually(lambda: worker.ended)
    assert worker.process.returncode == 0
    moved = {cause: stack.leader.metrics(cause=cause)["lockstep_scheduler_requests_moved_total"] for cause in ("lost", "drained")}
    assert moved["lost"] == lost
    assert moved["drained"] > 0


def test_a_request_that_takes_along_every_worker_gets_a_clear_error(start_stack: Callable[..., Stack], weightless_model: Path) -> None:
    crash = json.dumps([{"kind": "crash", "step": 3}])
    groups = ("--groups", "6", "--num-pages", "1000", "--simulated-faults", crash)
    stack = start_stack(model=weightless_model, engine="simulated", worker_args=groups)
    eventually(lambda: stack.groups_ready() == 6)
    with pytest.raises(openai.InternalServerError, match="the worker was lost, as were 3 workers or schedulers before it") as caught:
        stack.complete("hi", max_tokens=100, extra_body={"ignore_eos": True})
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]
    assert stack.scheduler.metrics(cause="lost")["lockstep_scheduler_requests_moved_total"] == 4


def test_the_only_worker_drains(start_stack: Callable[..., Stack], weightless_model: Path) -> None:
    script = {"step_s": 0.01, "default": {"ids": [40, 41], "repeat": True}}
    stack = start_stack(model=weightless_model, engine="scripted", script=script)
    with stack.stream("hi", max_tokens=200) as pieces:
        begun = next(pieces)
        stack.worker.terminate()
        eventually(lambda: "draining" in stack.scheduler.log)
        late = Late(stack)
        whole = begun + "".join(pieces)  # what runs ends in place
    assert len(whole) == len(begun) * 200
    eventually(lambda: stack.worker.ended)
    assert stack.worker.process.returncode == 0
    stack.worker.start_again()
    late.join(WITHIN_S)
    assert late.text  # what came meanwhile has waited


class Late(threading.Thread):
    """A request that comes while no group takes any."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._stack, self.text = stack, ""
        self.start()

    def run(self) -> None:
        self.text = self._stack.complete("hi", max_tokens=3)
