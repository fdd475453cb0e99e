"""Streams of server-sent events, and that they say what the answer as a whole says."""

from tests.services.gateway.conftest import Stack, events


async def test_str_02_chunks_and_whole_answer_agree(stack: Stack) -> None:
    stack.says("hello, world")
    chunks = await stack.chat_events(seed=1)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1])
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert (chunks[-1]["choices"][0]["delta"], chunks[-1]["choices"][0]["finish_reason"]) == ({}, "stop")
    assert await stack.content(seed=1) == "hello, world"


async def test_completions_stream_and_whole(stack: Stack) -> None:
    stack.says("hello, world")
    whole = (await stack.complete()).json()
    assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "hello, world")
    chunks = events((await stack.complete(stream=True)).content)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello, world"
