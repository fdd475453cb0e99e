"""Whatever bytes come, the process stays, answers the next request, and gives its memory back. FUZZ_S=60 makes it a long run."""

import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.processes import Family, eventually_async
from tests.services.gateway.scripted_scheduler import Script, ScriptedScheduler

SECONDS = float(os.environ.get("FUZZ_S", "5"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
AT_A_TIME = 16
PAUSE_S = 2.0  # for a client that waits for an answer
MAX_GROWTH_BYTES = 64 << 20
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models/tiny", "/v1/nope", "/", "//", "*", "/health")
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**70,
    1.5,
    1e308,
    "",
    "a",
    "\u2028",
    "<|im_end|>",
    [],
    {},
    [[]],
    [1, "a"],
    {"a": {}},
    "tiny",
)
HEADERS = (
    *(b"content-length: 5", b"content-length: -1", b"transfer-encoding: chunked", b"connection: close", b"expect: 100-continue"),
    *(b"authorization: Bearer \xe9", b"x-request-id: \r", b"x: \xff", b"y", b"z: " + b"z" * 70_000),
)
FIELDS = (
    *("model", "messages", "prompt", "stream", "n", "stop", "temperature", "max_tokens", "logprobs", "top_logprobs", "echo", "best_of"),
    *("logit_bias", "tools", "tool_choice", "response_format", "metadata", "seed", "stream_options", "chat_template_kwargs", "tokens"),
)


@pytest.fixture
async def gateway(tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[tuple[psutil.Process, int]]:
    """A process of its own, and its port."""
    scheduler = ScriptedScheduler(folder=tokenizer_folder, script=lambda submit: Script([[40], [41, 42], [2]], step_s=0.001))
    await scheduler.start()
    family, ports = Family(), tmp_path / "ports.json"
    command = [
        "-m",
        "services.gateway",
        "--scheduler",
        f"127.0.0.1:{scheduler.port}",
        "--served-model-name",
        "tiny",
        "--body-timeout-s",
        "1",
    ]
    command += ["--port", "0", "--admin-port", "0", "--ports-file", str(ports), "--parent-pid", str(os.getpid()), "--drain-s", "1"]
    with (tmp_path / "log").open("w") as log:
        environment = {**family.environment, "XDG_CACHE_HOME": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=log, stderr=log, env=environment)
    await eventually_async(ports.exists, 60)
    try:
        yield psutil.Process(process.pid), json.loads(ports.read_text())["http"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await scheduler.close()
        family.end()
        print((tmp_path / "log").read_text()[-5000:])


async def test_random_clients(gateway: tuple[psutil.Process, int]) -> None:
    process, port = gateway
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:

        async def answers() -> bool:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            return (await client.post("/v1/chat/completions", json=body)).status_code == 200

        async with asyncio.timeout(60):
            while not await answers():
                await asyncio.sleep(0.1)
        await fuzz(port, random.Random(SEED), 1.0)  # what is built once
        before = process.memory_info().rss
        sent = await fuzz(port, random.Random(SEED + 1), SECONDS)
        assert await answers()
        assert sent > SECONDS * 5
    assert process.is_running()
    await eventually_async(lambda: process.num_fds() < 100)
    assert process.memory_info().rss < before + MAX_GROWTH_BYTES


async def fuzz(port: int, source: random.Random, seconds: float) -> int:
    """Sends nonsense for so long; returns how often."""
    end, sent = asyncio.get_running_loop().time() + seconds, 0

    async def client() -> None:
        nonlocal sent
        while asyncio.get_running_loop().time() < end:
            await connection(port, source)
            sent += 1

    await asyncio.gather(*(client() for _ in range(AT_A_TIME)))
    return sent


async def connection(port: int, source: random.Random) -> None:
    """One connection: nonsense in pieces, and an end of some kind."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = source.choice((random_bytes, random_request, random_json))(source)
    cut = source.randrange(len(data) + 1) if source.random() < 0.3 else len(data)
    with contextlib.suppress(OSError, TimeoutError):  # the other side may have gone first
        size = source.choice((100, 10**6))
        for start in range(0, cut, size):
            writer.write(data[start : min(start + size, cut)])
            await writer.drain()
        end = source.random()
        if end < 0.3:
            writer.transport.abort()
            return
        if end < 0.6:
            writer.write_eof()  # half closed: it still reads
        async with asyncio.timeout(source.choice((0.01, 0.1, PAUSE_S))):
            await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def random_bytes(source: random.Random) -> bytes:
    return source.randbytes(source.choice((0, 1, 10, 1000, 100_000)))


def random_request(source: random.Random) -> bytes:
    """HTTP that is nearly right."""
    method = source.choice((b"GET", b"POST", b"PUT", b"OPTIONS", b"HEAD", b"\x00", b"PRI"))
    body = random_bytes(source)
    headers = [b"host: x", b"content-type: application/json"]
    headers += source.choices([b"content-length: %d" % len(body), *HEADERS], k=3)
    return method + b" " + source.choice(PATHS).encode() + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body


def random_json(source: random.Random) -> bytes:
    """A request for a route that reads JSON: fields and values that know each other by chance."""
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    body |= {source.choice(FIELDS): source.choice(VALUES) for _ in range(source.randrange(4))}
    for _ in range(source.choice((0, 0, 0, 50))):
        body = {"model": "tiny", "messages": [body]}
    text = json.dumps(body).encode()
    if source.random() < 0.2:
        place = source.randrange(len(text))
        text = text[:place] + source.randbytes(3) + text[place + 1 :]
    path = source.choice(PATHS[:4]).encode()
    head = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % len(text) + text
