"""A real gateway over HTTP, with a scripted scheduler at its other side."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from tests.processes import eventually_async
from tests.services.gateway.scripted_scheduler import STOP, Script, ScriptedScheduler
from tests.tiny import tiny_tokenizer

EOS = 2
ANY = "any"  # not tested


@dataclass
class Stack:
    """A gateway, its scheduler and a client."""

    scheduler: ScriptedScheduler
    http: httpx.AsyncClient
    folder: Path
    stop: asyncio.Event
    admin_url: str

    def plays(self, *steps: Any, reason: Any = STOP, **script: Any) -> None:
        """What every request from now on gets."""
        self.scheduler.script = lambda submit: Script(steps, reason, **script)

    def says(self, text: str, tokens_a_step: int = 1, **script: Any) -> list[int]:
        """Every request from now on gets the ids of `text` and EOS; returns them."""
        ids = self.encode(text)
        self.plays(*(ids[start : start + tokens_a_step] for start in range(0, len(ids), tokens_a_step)), [EOS], **script)
        return ids

    def encode(self, text: str) -> list[int]:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    async def chat(self, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions, with a message and a model unless given."""
        return await self.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body})

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **body})

    async def chat_events(self, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed chat."""
        response = await self.chat(stream=True, **body)
        assert response.status_code == 200, response.text
        return events(response.content)

    async def content(self, **body: Any) -> str:
        """The text of a chat, the same streamed and not."""
        whole = (await self.chat(**body)).json()["choices"][0]
        chunks = await self.chat_events(**body)
        deltas = [choice for chunk in chunks for choice in chunk["choices"]]
        joined = "".join(delta["delta"].get("content", "") for delta in deltas)
        assert (joined, deltas[-1]["finish_reason"]) == (whole["message"]["content"], whole["finish_reason"])
        return joined


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON events of a whole stream, whose framing is checked."""
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def assert_error(response: httpx.Response, status: int, param: str | None, code: str | None = ANY) -> dict[str, Any]:
    """The answer is OpenAI's error object of this content; returns it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    assert (error["type"], error["param"]) == (kind, param)
    assert code is ANY or error["code"] == code
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 600
    return error


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return folder


@pytest.fixture
async def start(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Stack]]]:
    """Starts a gateway with the given settings; keyword arguments `scheduler` go to the scripted scheduler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stop = asyncio.Event()
    running: list[asyncio.Task[None]] = []
    stacks: list[Stack] = []

    async def start_stack(
        scheduler: dict[str, Any] | None = None, wait: bool = True, more_schedulers: Sequence[ScriptedScheduler] = (), **settings: Any
    ) -> Stack:
        scripted = ScriptedScheduler(**{"folder": tokenizer_folder, **(scheduler or {})})
        await scripted.start()
        ports = tmp_path / f"ports-{len(running)}"
        given = {"port": 0, "admin_port": 0, "served_model_name": ["tiny", "org/tiny"], "drain_s": 0, **settings}
        targets = [f"127.0.0.1:{each.port}" for each in (scripted, *more_schedulers)]
        service = serve(GatewaySettings(scheduler=targets, ports_file=ports, **given), stop)
        running.append(asyncio.create_task(service))
        await eventually_async(ports.exists)
        bound = json.loads(ports.read_text())
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{bound['http']}", timeout=30, verify=False)  # certificates take 40 ms to load
        stack = Stack(scripted, http, scripted.folder, stop, f"http://127.0.0.1:{bound['admin']}")
        stacks.append(stack)
        while wait and (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
        return stack

    yield start_stack
    for stack in stacks:
        await stack.http.aclose()
    stop.set()
    await asyncio.gather(*running)
    for stack in stacks:
        await stack.scheduler.close()


@pytest.fixture
async def stack(start: Callable[..., Awaitable[Stack]]) -> Stack:
    return await start()
