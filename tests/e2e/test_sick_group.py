"""K8S-12: one sick group among several costs the others nothing, and is used again when it is well."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import Service, Stack
from tests.processes import eventually

REQUESTS = 12
WITHIN_S = 30.0  # a group that is well again is used
ANSWER_S = 5.0  # nobody waits for the sick ones


@pytest.fixture
def stack(tmp_path: Path, weightless_model: Path) -> Iterator[Stack]:
    script = {"step_s": 0.002, "default": {"ids": [40, 41, 42]}}
    with Stack(tmp_path, model=weightless_model, workers=3, engine="scripted", script=script) as running:
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


def processes(worker: Service) -> list[psutil.Process]:
    supervisor = psutil.Process(worker.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def test_k8s_12_groups_that_refuse_and_hang_are_left_out_until_they_are_well(stack: Stack) -> None:
    assert_served(stack)
    refusing, hanging = stack.workers[1:]
    hung = processes(hanging)
    refusing.kill()
    for process in hung:
        process.suspend()
    try:
        eventually(lambda: stack.groups_ready() == 1)
        assert_served(stack)
        stack.scheduler.kill()  # one that starts meets them as they are
        stack.scheduler.start_again()
        eventually(lambda: stack.client.get("/health").is_success)
        assert_served(stack)
    finally:
        for process in hung:
            process.resume()
    refusing.start_again()
    eventually(lambda: stack.groups_ready() == 3, WITHIN_S)

    def all_serve() -> bool:
        assert_served(stack)
        return all(served_by(stack, f"group-{number}") for number in range(3))

    eventually(all_serve, WITHIN_S)
