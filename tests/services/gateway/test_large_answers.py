"""Requests and answers that are large hold up nobody: what is made at a time is bounded, and between the parts others get their turn."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from services.gateway.answer import Answer, Patience
from services.gateway.choice import TURN_TOKENS, Choice, Delta, Echo
from services.gateway.generation import Generation
from services.gateway.model import Model
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.sending import PIECE_CHARACTERS, json_response
from services.gateway.openai.submission import TURN_TOKENS as TURN_OF_PROMPTS
from services.gateway.openai.submission import submits
from services.gateway.openai.validation import completion_request
from services.gateway.text.tokenizer import TextTokenizer
from shared.protocol.generation_pb2 import Finished, FinishReason, Logprobs, Submit, Tokens
from shared.protocol.plan import ids_to_bytes
from tests.services.gateway.conftest import Stack, assert_error, events
from tests.tiny import TOOL_TEMPLATE, tiny_tokenizer

CHOICES, TOKENS, TOP = 4, 1000, 20
PATIENCE = Patience(keep_alive=60, first_token=60, idle=60)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return TextTokenizer(tokenizer_folder, max_length=4096)


def logprobs(count: int) -> Logprobs:
    likeliest = np.tile(np.arange(40, 40 + TOP, dtype="<i4"), count)
    values = np.full(count, -1.0, "<f4")
    return Logprobs(values=values.tobytes(), top=TOP, top_ids=likeliest.tobytes(), top_values=np.repeat(values, TOP).tobytes())


def generation(number: int, wake: asyncio.Event, prompt: list[int], scores_prompt: bool = False) -> Generation:
    """One of which all has come at once."""
    submit = Submit(request=number, attempt=1, prompt_ids=ids_to_bytes(prompt), max_tokens=TOKENS, logprobs=TOP)
    if scores_prompt:
        submit.prompt_logprobs = TOP
    made = Generation(submit, wake, 10 * TOKENS, lambda _, accepted, whole: None, lambda _: None)
    news = Tokens(request=number, attempt=1, first_index=0, ids=ids_to_bytes([40] * TOKENS), logprobs=logprobs(TOKENS))
    if scores_prompt:
        news.prompt_logprobs.CopyFrom(logprobs(len(prompt) - 1))
        news.first_position = 1
    made.on_tokens(news)
    made.on_finished(Finished(request=number, attempt=1, reason=FinishReason.FINISH_REASON_LENGTH, completion_tokens=TOKENS))
    return made


def answer_of(tokenizer: TextTokenizer, echo: Echo | None = None) -> Answer:
    wake = asyncio.Event()
    prompt = list(echo.ids) if echo else [5]
    made = [generation(number, wake, prompt, echo is not None and not number) for number in range(CHOICES)]
    if echo is not None:
        echo.scored_by = made[0]
    choices = [Choice(index, each, tokenizer.detokenizer(), (), frozenset(), echo) for index, each in enumerate(made)]
    deadline = asyncio.get_running_loop().time() + 60
    return Answer(choices, CHOICES, wake, PATIENCE, deadline, lambda choice, count: None, lambda seconds: None)


class Others:
    """Everything else on the event loop."""

    turns = 0


@asynccontextmanager
async def others() -> AsyncIterator[Others]:
    seen = Others()

    async def live() -> None:
        while True:
            seen.turns += 1
            await asyncio.sleep(0)

    living = asyncio.create_task(live())
    yield seen
    living.cancel()


async def test_what_comes_at_once_is_given_in_turns(tokenizer: TextTokenizer) -> None:
    answer = answer_of(tokenizer)
    given: list[list[Delta]] = []
    async with others() as seen:
        while not answer.finished:
            given.append(await answer.next())
    tokens = [sum(len(delta.tokens) for delta in deltas) for deltas in given]
    assert sum(tokens) == CHOICES * TOKENS
    assert max(tokens) <= TURN_TOKENS
    assert seen.turns >= len(given) - 1
    texts = ["".join(delta.text for deltas in given for delta in deltas if delta.index == index) for index in range(CHOICES)]
    assert texts == [tokenizer.decode([40] * TOKENS)] * CHOICES


async def test_so_is_a_prompt_that_is_repeated(tokenizer: TextTokenizer) -> None:
    ids = [41, 42] * TOKENS
    text = tokenizer.decode(ids)
    answer = answer_of(tokenizer, Echo(text, ids, tokenizer.prompt_pieces(ids, is_text=False)))
    given: list[list[Delta]] = []
    async with others() as seen:
        while not answer.finished:
            given.append(await answer.next())
    assert max(sum(len(delta.tokens) for delta in deltas) for deltas in given) <= TURN_TOKENS
    assert seen.turns >= len(given) - 1
    for index in range(CHOICES):
        own = [delta for deltas in given for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == text + tokenizer.decode([40] * TOKENS)
        told = [token for delta in own for token in delta.tokens]
        assert [token.id for token in told] == [*ids, *[40] * TOKENS]
        assert [token.score is None for token in told] == [True, *[False] * (len(told) - 1)]


async def sent(pieces: Iterator[str]) -> tuple[list[bytes], dict[str, str]]:
    """The messages and the headers of an answer of these pieces; others had their turn between the messages."""
    state = {"deadline": asyncio.get_running_loop().time() + 60}
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": state})
    bodies: list[bytes] = []
    headers: dict[str, str] = {}
    turns: list[int] = []
    never = asyncio.Event()

    async def receive() -> Any:
        await never.wait()

    async with others() as seen:

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers.update((name.decode(), value.decode()) for name, value in message["headers"])
            else:
                turns.append(seen.turns)
                bodies.append(message["body"])

        await json_response(pieces, request)(request.scope, receive, send)
    assert all(after > before for before, after in itertools.pairwise(turns))
    return bodies, headers


async def test_a_whole_answer_is_written_while_it_is_sent(tokenizer: TextTokenizer) -> None:
    answer = answer_of(tokenizer)
    tokens = [token for _ in range(50) if not answer.finished for delta in await answer.next() for token in delta.tokens]
    bodies, headers = await sent(chat_logprobs(tokens, tokenizer.token_texts))
    assert len(json.loads(b"".join(bodies))["content"]) == CHOICES * TOKENS
    assert "content-length" not in headers
    entries = [body.count(b'"top_logprobs"') for body in bodies]
    assert max(entries) <= 2 * TURN_TOKENS
    assert len(bodies) > CHOICES * TOKENS // (2 * TURN_TOKENS)


async def test_a_small_one_is_one_message() -> None:
    bodies, headers = await sent(iter(["{", '"a":', "1}"]))
    assert (bodies, headers["content-length"]) == ([b'{"a":1}'], "7")


async def test_pieces_that_are_large_are_messages_of_their_own() -> None:
    large = "1" * PIECE_CHARACTERS
    bodies, _ = await sent(iter(["[", large, ",", large, "]"]))
    assert b"".join(bodies).decode() == f"[{large},{large}]"
    assert max(map(len, bodies)) <= PIECE_CHARACTERS + 1


async def test_tokens_of_text_that_a_parser_holds_are_told_meanwhile(start: Any, tmp_path: Path) -> None:
    """A call whose arguments do not begin is held back; what its tokens are worth is not."""
    tiny_tokenizer(tmp_path / "tools", TOOL_TEMPLATE)
    stack: Stack = await start({"folder": tmp_path / "tools", "max_length": 4096})
    ids = stack.says("<tool_call>{" + " \n" * 600, tokens_a_step=100)
    tools = [{"type": "function", "function": {"name": "f"}}]
    chunks = await stack.chat_events(tools=tools, logprobs=True)
    told = [len(choice["logprobs"]["content"]) for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert sum(told) == len(ids)
    assert max(told) < 2 * TURN_TOKENS
    assert len(told) > 1


@pytest.mark.parametrize("stop", [None, "zz"])
async def test_a_stream_of_large_steps_says_what_the_whole_says(start: Any, stop: str | None) -> None:
    stack: Stack = await start({"max_length": 8192})
    text = "hello, world é😀 and on " * 40
    stack.says(text, tokens_a_step=10_000)
    prompt = "once upon a time " * 50
    asked = {"prompt": prompt, "n": 2, "echo": True, "logprobs": 2, "stop": stop, "max_tokens": 4000}
    whole = (await stack.complete(**asked)).json()["choices"]
    chunks = [choice for chunk in events((await stack.complete(stream=True, **asked)).content) for choice in chunk["choices"]]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert len(own) > 2
        assert "".join(chunk["text"] for chunk in own) == choice["text"] == prompt + text
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        for key, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][key]] == values
            assert max(len(chunk["logprobs"][key]) for chunk in own) <= TURN_TOKENS


async def test_many_long_prompts_are_looked_at_in_turns(tokenizer: TextTokenizer) -> None:
    model = Model("f" * 64, 384, 4 * TURN_OF_PROMPTS, frozenset({2}), tokenizer, {})
    body = completion_request(b'{"model": "tiny", "prompt": "x"}')
    state = {"deadline": asyncio.get_running_loop().time() + 60, "tenant": "", "traceparent": "", "request_id": "r"}
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": state})
    async with others() as seen:
        messages = await submits(body, model, [[5] * (TURN_OF_PROMPTS // 2)] * 8, 5, "prompt", request)
        assert seen.turns >= 4
    assert [len(message.prompt_ids) for message in messages] == [2 * TURN_OF_PROMPTS] * 8


async def test_reading_a_request_of_many_parts_holds_up_nobody(start: Any) -> None:
    """One of a hundred thousand small objects takes half a second."""
    stack: Stack = await start({"max_length": 1 << 20})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": [{"type": "text", "text": "x"}] * 20_000, "tool_calls": [call] * 20_000}
    body = json.dumps({"model": "tiny", "messages": [calling, {"role": "tool", "content": "y"}]}).encode()
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()  # of the event loop's thread: what others do meanwhile does not count
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    watching = asyncio.create_task(watch())
    response = await stack.http.post("/v1/chat/completions/render", content=body)
    watching.cancel()
    assert_error(response, 400, "messages[1].tool_call_id")
    assert longest < 0.1
