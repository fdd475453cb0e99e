"""The simulated stack of the benchmarks: real processes and gRPC, groups in one process, the proxy that makes a distance."""

import socket
import threading
import time
from pathlib import Path

import pytest

from benchmarks.simulated_model import EOS, VOCAB_SIZE
from benchmarks.simulation import build_proxy, distant, model_folder, service, session
from services.worker.engine.simulated import Language

ROUND_TRIPS = 20


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_proxy(tmp_path_factory.mktemp("proxy"))


def echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("delay_us", [0, 3_000])
def test_the_proxy_delays_every_byte_and_changes_none(proxy: Path, delay_us: int) -> None:
    sent = bytes(range(256)) * 8_000
    with socket.create_server(("127.0.0.1", 0)) as listener, distant(proxy, listener.getsockname()[1], delay_us) as port:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            fastest = 1.0
            for _ in range(ROUND_TRIPS):
                start = time.monotonic()
                connection.sendall(b"x")
                assert connection.recv(1) == b"x"
                fastest = min(fastest, time.monotonic() - start)
            assert 2 * delay_us / 1e6 <= fastest < 2 * delay_us / 1e6 + 0.05
            threading.Thread(target=send, args=(connection, sent), daemon=True).start()
            got = bytearray()
            while data := connection.recv(1 << 16):
                got += data
            assert got == sent


async def test_a_scheduler_drives_four_groups_of_one_process_at_a_distance(tmp_path: Path, proxy: Path) -> None:
    language = Language(VOCAB_SIZE, (EOS,), 50)
    engine = ("--engine", "simulated", "--groups", "4", "--simulated-model", "0.6b", "--simulated-mean-tokens", "50")
    sizes = ("--max-num-seqs", "4", "--num-pages", "200")
    with (
        service("worker", "--model", str(model_folder(tmp_path)), *engine, *sizes) as worker,
        distant(proxy, worker["grpc"], 1_000) as port,
        service("scheduler", "--worker", f"127.0.0.1:{port}") as scheduler,
    ):
        async with session(scheduler["grpc"]) as client:
            requests = [client.submit(20 + number, 100, ignore_eos=False) for number in range(30)]
            answers = [await client.ended(request) for request in requests]
    for answer in answers:
        expected = language.completion(answer.prompt, 100)
        assert answer.ids == expected
