"""From a router in front of a gateway of several processes to the worker."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually

ENDLESS = 900
STEP_S = 0.05  # 200 tokens take 10 s
CHUNK = 1 << 16


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, weightless_model: Path) -> Iterator[Stack]:
    script = {"step_s": STEP_S, "by_seed": {ENDLESS: {"ids": [40, 41, 42], "repeat": True}}}
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, model=weightless_model, engine="scripted", script=script, gateway_args=["--processes", "2"]) as running:
        yield running


def copy(source: socket.socket, target: socket.socket) -> None:
    """Until either side is gone; then both are."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def router(port: int) -> Iterator[str]:
    """Passes one connection on to the gateway; the address where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as gateway:
                back = threading.Thread(target=copy, args=(gateway, client))
                back.start()
                copy(client, gateway)
                back.join()

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving.join()


def running(stack: Stack) -> float:
    return stack.scheduler.metrics()["lockstep_num_requests_running"]


@contextmanager
def stream(url: str) -> Iterator[tuple[Iterator[str], int]]:
    """The lines of an answer that does not end, and the port that they come to."""
    body = {"model": "tiny", "prompt": "hi", "seed": ENDLESS, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        yield response.iter_lines(), response.extensions["network_stream"].get_extra_info("client_addr")[1]


def test_can_05_a_stop_string_ends_the_work_in_the_engine(stack: Stack) -> None:
    """On an idle machine at most 4 tokens are computed after the sixth. A busy one may be a second and more late."""

    def computed() -> float:
        return stack.scheduler.metrics()["lockstep_generation_tokens_total"]

    before = computed()
    body = {"model": "tiny", "prompt": "hi", "seed": ENDLESS, "max_tokens": 200, "ignore_eos": True, "stop": "GHFGH"}  # F G H F G H
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("F", "stop")
    assert answer["usage"]["completion_tokens"] == 6
    eventually(lambda: running(stack) == 0)
    assert 6 <= computed() - before <= 6 + 4 + 25


def test_can_08_who_leaves_the_router_leaves_the_worker(stack: Stack) -> None:
    with router(stack.gateway.ports["http"]) as url:
        with stream(url) as (lines, _):
            next(lines)
            assert running(stack) == 1
        eventually(lambda: running(stack) == 0, 5.0)  # by itself it would end later


def test_can_08_a_killed_process_of_the_gateway_frees_the_worker(stack: Stack) -> None:
    with stream(stack.url) as (lines, port):
        next(lines)
        (process,) = [child for child in psutil.Process(stack.gateway.pid).children() if has_client(child, port)]
        process.kill()
        eventually(lambda: running(stack) == 0, 5.0)
        with pytest.raises(httpx.TransportError):
            list(lines)
    eventually(lambda: is_whole(stack.gateway.pid), 60.0)
    assert httpx.get(f"{stack.url}/health").is_success


def has_client(process: psutil.Process, port: int) -> bool:
    """Whether it is connected with this port of a client."""
    return any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp"))


def is_whole(gateway: int) -> bool:
    """Both processes are there, and what each has started itself, down to the processes that run chat templates."""
    children = [child for child in psutil.Process(gateway).children() if child.children()]
    return len(children) == 2 and all(any(each.children() for each in child.children()) for child in children)
