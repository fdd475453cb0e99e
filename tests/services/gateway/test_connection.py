"""What comes over a connection before the application sees a request."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable

import httpx
import psutil
import pytest

from services.gateway import server
from services.gateway.connection import MAX_HEAD_BYTES
from services.gateway.openai import sending
from tests.processes import eventually_async
from tests.services.gateway.conftest import EOS, Stack, assert_error, events
from tests.services.gateway.scripted_scheduler import LENGTH

Start = Callable[..., Awaitable[Stack]]
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = 1 << 16


async def opened(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(stack.http.base_url.host, stack.http.base_url.port)


async def answered(reader: asyncio.StreamReader) -> httpx.Response:
    """What comes until the connection is closed."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


@pytest.mark.parametrize(
    "begun, piece",
    [
        (GET + b"X: ", b"a" * PIECE),
        (GET, b"X: a\r\n" * (PIECE // 6)),
        (CHUNKED + b"0\r\n", b"X: a\r\n" * (PIECE // 6)),
    ],
    ids=["a header", "headers", "trailers"],
)
async def test_a_head_without_end_is_cut_off(stack: Stack, begun: bytes, piece: bytes) -> None:
    reader, writer = await opened(stack)
    writer.write(begun)
    sent = 0
    async with asyncio.timeout(30):
        while not reader.at_eof() and sent < 500 * PIECE:
            writer.write(piece)
            sent += len(piece)
            await asyncio.sleep(0)
            try:
                await writer.drain()
            except ConnectionError:
                break
    assert sent < 250 * PIECE
    writer.close()
    assert (await stack.http.get("/health")).status_code == 200


async def test_a_large_head_is_told(stack: Stack) -> None:
    assert (await stack.http.get("/v1/models", headers={"x": "a" * (MAX_HEAD_BYTES - 1000)})).status_code == 200
    reader, writer = await opened(stack)
    writer.write(GET + b"X: " + b"a" * MAX_HEAD_BYTES)
    response = await answered(reader)
    assert_error(response, 431, None, None)
    assert response.headers["connection"] == "close"
    writer.close()


async def test_large_bodies_and_many_requests_of_a_connection_are_no_head(stack: Stack) -> None:
    stack.plays([EOS])
    for _ in range(3):
        assert (await stack.complete(user="u" * (3 * MAX_HEAD_BYTES // 2))).status_code == 200
    reader, writer = await opened(stack)
    padded = GET + b"X: " + b"a" * (MAX_HEAD_BYTES // 4) + b"\r\n"
    writer.write((padded + b"\r\n") * 7 + padded + b"Connection: close\r\n\r\n")
    assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 8
    writer.close()


@pytest.mark.parametrize(
    "request_", [b"FOO /v1/models HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n", CHUNKED + b"zz\r\n", GET + b"Content-Length: -1\r\n\r\n"]
)
async def test_what_is_no_http_is_told_in_the_same_shape(stack: Stack, request_: bytes) -> None:
    reader, writer = await opened(stack)
    writer.write(request_)
    assert_error(await answered(reader), 400, None, None)
    writer.close()


@pytest.mark.parametrize("between", [b"", GET + b"\r\n"], ids=["at once", "behind another request"])
async def test_garbage_behind_a_request_does_not_garble_its_answer(stack: Stack, between: bytes) -> None:
    held = asyncio.Event()
    stack.plays([40], held, [EOS])
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": True}).encode()
    reader, writer = await opened(stack)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"\n\n")
    writer.write(between + b"no HTTP\r\n\r\n")
    assert b"HTTP/1.1" not in await reader.read()
    await eventually_async(lambda: bool(stack.scheduler.cancels))
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_can_01_a_client_that_leaves_with_its_next_request_sent(stack: Stack, stream: bool) -> None:
    held = asyncio.Event()
    stack.plays([40], held, [EOS])
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": stream}).encode()
    _, writer = await opened(stack)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body + GET + b"\r\n")
    await eventually_async(lambda: bool(stack.scheduler.submits))
    writer.close()
    await eventually_async(lambda: bool(stack.scheduler.cancels))


async def test_a_head_that_does_not_come_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
    stack = await start(wait=False)
    while (
        await stack.http.get("/health", headers={"connection": "close"})
    ).status_code != 200:  # a connection kept might end under the next
        await asyncio.sleep(0.01)
    stack.plays([40], [EOS], step_s=0.3)
    connections = [await opened(stack) for _ in range(3)]
    connections[1][1].write(GET)
    connections[2][1].write(GET + b"\r\n" + GET)  # the second of a connection
    async with asyncio.timeout(30):
        for reader, writer in connections:
            await reader.read()
            writer.close()
    assert (await stack.complete()).status_code == 200, "an answer may take longer"


async def test_what_follows_an_answer_keeps_no_connection(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.5)
    stack = await start(wait=False)
    nowhere = b"POST /nope HTTP/1.1\r\nHost: x\r\n"
    refused, in_chunks = nowhere + b"Content-Length: 100\r\n\r\n", nowhere + b"Transfer-Encoding: chunked\r\n\r\n"

    async def ends(request: bytes, follows: bytes) -> None:
        reader, writer = await opened(stack)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # where we are so slow that it has ended before
            writer.write(request)
            await reader.readuntil(b"}")
            writer.write(follows)
            while await reader.read(PIECE):
                pass
        writer.close()

    async with asyncio.timeout(30):
        await asyncio.gather(
            ends(GET + b"\r\n", b"\r\n"),
            ends(refused, b"a" * 10),
            ends(refused, b"a" * 100),
            ends(in_chunks, b"5\r\nab"),
            ends(in_chunks, b"0\r\nX: "),
        )


async def test_a_client_that_takes_nothing_keeps_no_connection(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even after its request was given up, when what has been written is still to be sent."""
    monkeypatch.setattr(sending, "UNREAD_S", 0.1)
    stack = await start({"max_length": 1 << 20}, timeout_s=2.0)
    ids = stack.encode("hello " * 1500)
    stack.plays(ids, reason=LENGTH)
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": len(ids), "logprobs": 20}).encode()  # a megabyte
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", stack.http.base_url.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        port = client.getsockname()[1]

        def is_kept() -> bool:
            return any(each.raddr and each.raddr.port == port for each in psutil.Process().net_connections("tcp"))

        await eventually_async(lambda: bool(stack.scheduler.submits))
        assert is_kept()
        await eventually_async(lambda: not is_kept())
    stack.says("hello")
    assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_a_request_that_offers_another_protocol_is_answered_in_this_one(stack: Stack, protocol: bytes) -> None:
    """Java's HttpClient offers HTTP/2 with every request."""
    stack.says("ab")
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    head += b"HTTP2-Settings: AAEAAEAA\r\nUpgrade: %b\r\n" % protocol
    asking = head + b"Content-Length: %d\r\n\r\n" % len(body)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    last = GET + b"Connection: close\r\n\r\n"
    reader, writer = await opened(stack)
    for piece in (asking[:150], asking[150:], body[:10], body[10:] + chunked + asking + body + last):
        writer.write(piece)
        await asyncio.sleep(0.01)
    answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    writer.close()
    assert [answer.split(b" ")[0] for answer in answers] == [b"200"] * 4
    assert [b'"text":"ab"' in answer for answer in answers] == [True, True, True, False]


async def test_a_client_of_http_1_0_gets_no_chunks(start: Start) -> None:
    """Nor a 100, and no connection to go on with: an answer of unknown length ends with it."""
    stack = await start({"max_length": 1 << 20})
    stack.says("ab")

    async def asks(path: str, **fields: object) -> tuple[httpx.Response, httpx.Response]:
        """The answer, and that to a client of today."""
        body = json.dumps({"model": "tiny", **fields}).encode()
        head = b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        reader, writer = await opened(stack)
        writer.write(head % (path.encode(), len(body)) + body)
        answer = await answered(reader)
        writer.close()
        assert (answer.headers["connection"], "transfer-encoding" in answer.headers) == ("close", False)
        return answer, await stack.http.post(path, json={"model": "tiny", **fields})

    stream, today = await asks("/v1/completions", prompt="hi", stream=True)
    assert today.headers["transfer-encoding"] == "chunked"
    for each in (stream, today):
        assert "".join(chunk["choices"][0]["text"] for chunk in events(each.content)) == "ab"
    large, today = await asks("/tokenize", prompt="a" * 2 * PIECE)
    assert (today.headers["transfer-encoding"], large.json()) == ("chunked", today.json())
    for path, status in (("/tokenize", 200), ("/nope", 404)):
        small, _ = await asks(path, prompt="a")
        assert (small.status_code, small.headers["content-length"]) == (status, str(len(small.content)))
