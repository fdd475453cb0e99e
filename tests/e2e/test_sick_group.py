"""K8S-12: one sick group among several costs the others nothing, and is used again when it is well."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import Service, Stack
from tests.processes import eventually

REQUESTS = 12
WITHIN_S = 30.0  # a group that is well again is used
ANSWER_S = 5.0  # nobody waits for the sick ones


WELL = {"step_s": 0.002, "default": {"ids": [40, 41, 42]}}
SICK = {"step_s": 0.002, "default": {"ids": [-2], "repeat": True}}  # no row is finite


@pytest.fixture
def stack(tmp_path: Path, weightless_model: Path) -> Iterator[Stack]:
    deadline = ("--plan-deadline-s", "1")
    with Stack(tmp_path, model=weightless_model, workers=3, engine="scripted", script=WELL, scheduler_args=deadline) as running:
        eventually(lambda: running.groups_ready() == 3)
        yield running


def served_by(stack: Stack, engine: str) -> float:
    return stack.leader.metrics(engine=engine).get("lockstep_request_success_total", 0.0)


def assert_served(stack: Stack) -> None:
    for number in range(REQUESTS):
        begun_at = time.monotonic()
        body = {"model": stack.names[0], "prompt": f"{number} times", "max_tokens": 8}
        headers = {"x-request-id": f"request-{number}", "traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
        answer = stack.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]
        assert answer.headers["x-request-id"] == f"request-{number}"
        assert time.monotonic() - begun_at < ANSWER_S
    assert [model["id"] for model in stack.client.get("/v1/models").raise_for_status().json()["data"]] == list(stack.names)


def ranks(worker: Service) -> list[psutil.Process]:
    return psutil.Process(worker.pid).children(recursive=True)


@contextlib.contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def start_again(stack: Stack, worker: Service, script: Mapping[str, object]) -> None:
    (stack.folder / "script.json").write_text(json.dumps(script))
    worker.start_again()


def all_serve(stack: Stack) -> bool:
    assert_served(stack)
    return all(served_by(stack, f"group-{number}") for number in range(3))


def test_k8s_12_groups_that_refuse_and_hang_are_left_out_until_they_are_well(stack: Stack) -> None:
    assert_served(stack)
    refusing, hanging = stack.workers[1:]
    refusing.kill()
    with suspended([psutil.Process(hanging.pid), *ranks(hanging)]):
        eventually(lambda: stack.groups_ready() == 1)
        assert_served(stack)
        stack.scheduler.kill()  # one that starts meets them as they are
        stack.scheduler.start_again()
        eventually(lambda: stack.client.get("/health").is_success)
        assert_served(stack)
    # Now one that lives, but for its ranks, and one that fails every step.
    start_again(stack, refusing, SICK)
    eventually(lambda: stack.groups_ready() == 3, WITHIN_S)
    with suspended(ranks(hanging)):

        def both_are_found_out() -> bool:
            assert_served(stack)
            return stack.groups_ready() == 1

        eventually(both_are_found_out, WITHIN_S)
        assert stack.leader.metrics(cause="overdue")["lockstep_scheduler_group_losses_total"] >= 1
        assert "the scheduler has ended it: given up: no result of plan" in hanging.log
        assert stack.leader.metrics(engine="group-1")["lockstep_scheduler_group_ejections_total"] >= 1
    refusing.kill()
    start_again(stack, refusing, WELL)
    eventually(lambda: all_serve(stack) and stack.groups_ready() == 3, WITHIN_S)
