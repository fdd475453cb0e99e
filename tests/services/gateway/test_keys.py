"""API keys: who may ask, how much, and what becomes of the file while the gateway runs."""

import asyncio
import json
import logging
import multiprocessing
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import keys
from services.gateway.errors import Overloaded
from services.gateway.key_command import make_key
from services.gateway.keys import ApiKey, digest_of
from services.gateway.limits import Limits, shared_memory
from shared.errors import ConfigError
from tests.processes import eventually_async
from tests.services.gateway.conftest import EOS, Stack, assert_error, events

Start = Callable[..., Awaitable[Stack]]
MINUTE_S = 60.0


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def chat_with(stack: Stack, headers: dict[str, str], **body: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
    return await stack.http.post("/v1/chat/completions", json=body, headers=headers)


async def raw_answer(stack: Stack, authorization: bytes) -> bytes:
    """To a request with a header that clients refuse to send."""
    reader, writer = await asyncio.open_connection(stack.http.base_url.host, stack.http.base_url.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + authorization + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def test_sec_02_keys(start: Start, key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    good, other = keys.add(key_file, "alice"), keys.add(key_file, "bob")
    stack = await start(api_keys=key_file)
    assert_error(await stack.http.get("/v1/models"), 401, None, None)
    for wrong in ("Bearer", "Bearer ", f"Bearer  {good}", f"Basic {good}", "Bearer nope", f"Bearer {good[:-1]}", f"Bearer {good}x", good):
        refused = await raw_answer(stack, wrong.encode())
        assert b" 401 " in refused
        assert b'"code": "invalid_api_key"' in refused
        assert good[:10].encode() not in refused
    for strange in ("Bearer schlüssel".encode(), "Bearer schlüssel".encode("latin-1"), b"Bearer " + b"x" * (1 << 20)):
        assert b" 401 " in await raw_answer(stack, strange)
    twice = [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {other}")]
    assert_error(await stack.http.get("/v1/models", headers=twice), 401, None, "invalid_api_key")
    for scheme in ("Bearer", "bearer", "BEARER"):
        for key in (good, other):
            answer = await stack.http.get("/v1/models", headers={"Authorization": f"{scheme} {key}"})
            assert answer.status_code == 200
    stack.plays([40], [EOS])
    assert (await chat_with(stack, bearer(good))).status_code == 200
    assert not any(secret in caplog.text for secret in (good, other, digest_of(good.encode())))


async def test_every_route_but_health_needs_a_key(start: Start, key_file: Path) -> None:
    keys.add(key_file, "alice")
    stack = await start(api_keys=key_file)
    assert (await stack.http.get("/health")).status_code == 200
    for path in (
        "/v1/models",
        "/v1/models/tiny",
        "/version",
        "/status",
        "/openapi.json",
        "/docs",
        "/metrics",
        "/nope",
        "/health/",
        "/Health",
    ):
        assert_error(await stack.http.get(path), 401, None)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/nope"):
        assert_error(await stack.http.post(path, json={}), 401, None)
    assert_error(await stack.http.options("/v1/models"), 401, None)


async def test_without_a_file_all_is_open_and_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    stack = await start()
    assert (await stack.http.get("/v1/models")).status_code == 200
    assert (await stack.http.get("/v1/models", headers=bearer("whatever"))).status_code == 200
    assert "no API keys" in caplog.text


async def test_the_file_is_read_again(
    start: Start, key_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.02)
    old = keys.add(key_file, "old")
    stack = await start(api_keys=key_file)

    async def status(key: str) -> int:
        return (await stack.http.get("/v1/models", headers=bearer(key))).status_code

    async def becomes(key: str, expected: int) -> None:
        async with asyncio.timeout(30):
            while await status(key) != expected:
                await asyncio.sleep(0.01)

    new = keys.add(key_file, "new")
    await becomes(new, 200)
    assert await status(old) == 200
    content = json.loads(key_file.read_text())
    key_file.write_text("{")
    await eventually_async(lambda: "stay good" in caplog.text)
    assert (await status(old), await status(new)) == (200, 200)
    key_file.write_text(json.dumps({"keys": [each for each in content["keys"] if each["name"] == "new"]}))
    await becomes(old, 401)
    key_file.unlink()
    assert await status(new) == 200


def told(**key: object) -> str:
    """A file of one key."""
    return json.dumps({"keys": [key]})


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("", "JSON"),
        ("[]", "object"),
        ('{"keys": []}', "at least 1"),
        (told(name="a", sha256="abc"), "sha256"),
        (told(name="a b", sha256="0" * 64), "name"),
        (told(name="a", sha256=digest_of(b"")), "empty key"),
        (told(name="a", sha256="0" * 64, limit=3), "limit"),
        (told(name="a", sha256="0" * 64, requests_per_minute=0), "requests_per_minute"),
        (json.dumps({"keys": [{"name": "a", "sha256": "0" * 64}, {"name": "a", "sha256": "1" * 64}]}), "twice"),
        (" " * (keys.MAX_FILE_BYTES + 1), "bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_start(key_file: Path, content: str, complaint: str) -> None:
    key_file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        keys.KeyRing(key_file)


def test_a_file_that_is_not_there_is_refused(key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.json cannot be read"):
        keys.KeyRing(key_file)


def test_the_command_makes_keys(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_key(["alice", "--file", str(key_file), "--tenant", "a-team", "--requests-per-minute", "7"]) == 0
    secret = capsys.readouterr().out.strip()
    assert len(secret) > 40
    found = keys.KeyRing(key_file).find(secret.encode())
    assert found == ApiKey(name="alice", sha256=digest_of(secret.encode()), tenant="a-team", requests_per_minute=7)
    assert secret not in key_file.read_text()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert make_key(["alice", "--file", str(key_file)]) == 2, "the name is taken"
    assert make_key(["b b", "--file", str(key_file)]) == 2
    assert make_key(["bob", "--file", str(key_file), "--concurrent-requests", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert len(keys.read(key_file)) == 1


async def test_a_key_is_a_tenant_with_a_cache_of_its_own(start: Start, key_file: Path) -> None:
    """PFX-07: a client cannot choose another tenant's cache, whatever salt it sends."""
    mine, colleague, stranger = keys.add(key_file, "a", "team"), keys.add(key_file, "b", "team"), keys.add(key_file, "c")
    stack = await start(api_keys=key_file)
    stack.plays([40], [EOS])
    for key in (mine, colleague, stranger):
        for salt in ({}, {"cache_salt": "team"}):
            assert (await chat_with(stack, bearer(key), tenant="c", **salt)).status_code == 200
    submits = stack.scheduler.submits
    assert [submit.tenant for submit in submits] == ["team", "team", "team", "team", "c", "c"]
    salts = [submit.cache_salt for submit in submits]
    assert salts[:2] == salts[2:4]
    assert len({*salts}) == 4


async def test_limits_of_a_key(start: Start, key_file: Path) -> None:
    limited, free = keys.add(key_file, "limited", concurrent_requests=1), keys.add(key_file, "free")
    stack = await start(api_keys=key_file)
    held = asyncio.Event()
    stack.plays([40], held, [EOS])
    first = asyncio.create_task(chat_with(stack, bearer(limited)))
    await eventually_async(lambda: len(stack.scheduler.submits) == 1)
    refused = await chat_with(stack, bearer(limited))
    assert_error(refused, 429, None, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    other = asyncio.create_task(chat_with(stack, bearer(free)))
    await eventually_async(lambda: len(stack.scheduler.submits) == 2)
    held.set()
    assert [(await each).status_code for each in (first, other)] == [200, 200]
    assert (await chat_with(stack, bearer(limited))).status_code == 200, "room again"
    assert (await stack.http.get("/v1/models", headers=bearer(limited))).status_code == 200


async def test_tokens_count_when_a_request_has_ended(start: Start, key_file: Path) -> None:
    key = keys.add(key_file, "a", tokens_per_minute=5)
    stack = await start(api_keys=key_file)
    stack.plays([40], [EOS])
    answer = await chat_with(stack, bearer(key))
    assert answer.json()["usage"]["total_tokens"] > 5
    assert_error(await chat_with(stack, bearer(key)), 429, None, "rate_limit_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_an_answer_that_nobody_waited_for_count(start: Start, key_file: Path, stream: bool) -> None:
    key = keys.add(key_file, "a", tokens_per_minute=5)
    stack = await start(api_keys=key_file)
    stack.plays([40], asyncio.Event())
    asked = asyncio.create_task(chat_with(stack, bearer(key), stream=stream))
    await eventually_async(lambda: bool(stack.scheduler.submits))
    asked.cancel()
    await eventually_async(lambda: bool(stack.scheduler.cancels))
    assert_error(await chat_with(stack, bearer(key)), 429, None, "rate_limit_exceeded")


async def test_cors_is_off_unless_asked_for(start: Start, key_file: Path) -> None:
    origin = {"Origin": "https://a.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    closed = await start()
    for answer in (
        await closed.http.get("/v1/models", headers=origin),
        await closed.http.options("/v1/chat/completions", headers=preflight),
    ):
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_cors_for_the_origins_that_are_named(start: Start, key_file: Path) -> None:
    origin = {"Origin": "https://a.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    keys.add(key_file, "a")
    stack = await start(api_keys=key_file, cors_origins=["https://a.example"])
    preflight["Access-Control-Request-Headers"] += ",x-stainless-os"  # of the official client, in a browser
    preflight["Access-Control-Request-Private-Network"] = "true"  # of Chromium, for a page of the public internet
    allowed = await stack.http.options("/v1/chat/completions", headers=preflight)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert allowed.headers["access-control-allow-private-network"] == "true"
    refused = await stack.http.get("/v1/models", headers=origin)
    assert_error(refused, 401, None)
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in (await stack.http.get("/v1/models", headers={"Origin": "https://b.example"})).headers


class Clock:
    """Limits on a clock that a test moves."""

    def __init__(self, limits: Limits, **key: Any) -> None:
        self.limits, self.now = limits, 10 * MINUTE_S
        self.key = ApiKey(name="a", sha256="0" * 64, **key)

    def request(self, tokens: int = 0) -> float:
        """0, or after how many seconds it may come again."""
        try:
            self.limits.begin(self.key, self.now)
        except Overloaded as error:
            return error.retry_after_s or 0.0
        self.limits.end(self.key, tokens, self.now)
        return 0.0


@pytest.mark.parametrize("limit", [1, 2, 7, 60])
def test_requests_a_minute(limit: int) -> None:
    clock = Clock(Limits(), requests_per_minute=limit)
    admitted: list[float] = []
    for _ in range(10 * limit):
        wait_s = clock.request()
        if wait_s:
            clock.now += wait_s
        else:
            admitted.append(clock.now)
        assert sum(1 for at in admitted if at > clock.now - MINUTE_S) <= limit + 1
    assert admitted[:limit] == [10 * MINUTE_S] * limit
    assert len(admitted) >= 3 * limit, "who waits as told is served"


def test_tokens_a_minute() -> None:
    clock = Clock(Limits(), tokens_per_minute=100)
    assert clock.request(tokens=60) == 0.0
    assert clock.request(tokens=140) == 0.0
    wait_s = clock.request()
    clock.now += wait_s - 2
    assert clock.request() > 0
    clock.now += 3
    assert clock.request() == 0.0
    clock.now += 2 * MINUTE_S
    assert clock.request() == 0.0


def test_processes_count_together_and_a_dead_one_does_not() -> None:
    memory = shared_memory(multiprocessing.get_context("spawn"), 2)
    first, second = Limits(memory, 0), Limits(memory, 1)
    key = ApiKey(name="a", sha256="0" * 64, concurrent_requests=2)
    first.begin(key, 0.0)
    second.begin(key, 0.0)
    for limits in (first, second):
        with pytest.raises(Overloaded):
            limits.begin(key, 0.0)
    first = Limits(memory, 0)  # started again
    first.begin(key, 0.0)
    with pytest.raises(Overloaded):
        second.begin(key, 0.0)
    second.end(key, 0, 0.0)
    first.begin(key, 0.0)


def test_keys_that_come_and_go_do_not_fill_the_table() -> None:
    limits = Limits()
    for number in range(2 * keys.MAX_KEYS):
        key = ApiKey(name=f"key-{number}", sha256="0" * 64)
        now = number * 1.0
        limits.begin(key, now)
        limits.end(key, 1, now)


async def test_streams_count_until_they_end(start: Start, key_file: Path) -> None:
    key = keys.add(key_file, "a", concurrent_requests=1)
    stack = await start(api_keys=key_file)
    held = asyncio.Event()
    stack.plays([40], held, [EOS])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body, headers=bearer(key)) as stream:
        assert_error(await chat_with(stack, bearer(key)), 429, None)
        held.set()
        assert events(await stream.aread())[-1]["choices"][0]["finish_reason"] == "stop"
    assert (await chat_with(stack, bearer(key))).status_code == 200
