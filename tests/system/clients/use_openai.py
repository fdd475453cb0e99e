"""The official client: whole answers, streams, the `.stream()` helper, both of its kinds, and its errors. Arguments: URL, model."""

# It runs where other packages are installed.
# mypy: ignore-errors

import asyncio
import sys

import openai

URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"model": MODEL, "messages": QUESTION, "max_tokens": 20, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
assert MODEL in [model.id for model in client.models.list()]
whole = client.chat.completions.create(**OPTIONS)
text = whole.choices[0].message.content
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(client.chat.completions.create(**OPTIONS, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

deltas = ""
try:
    with client.chat.completions.stream(**OPTIONS) as stream:
        for event in stream:
            deltas += event.delta if event.type == "content.delta" else ""
        final = stream.get_final_completion()
except openai.LengthFinishReasonError as error:  # how this helper tells of an answer that is cut
    final = error.completion
assert deltas == final.choices[0].message.content == text
assert final.choices[0].finish_reason == whole.choices[0].finish_reason

scored = client.chat.completions.create(**OPTIONS, logprobs=True, top_logprobs=2)
assert len(scored.choices[0].logprobs.content[0].top_logprobs) == 2
several = client.chat.completions.create(**{**OPTIONS, "temperature": 1}, n=3, seed=1)
assert [choice.index for choice in several.choices] == [0, 1, 2]
assert client.chat.completions.create(**OPTIONS, tools=[TOOL]).choices[0].finish_reason in ("stop", "length", "tool_calls")
assert client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5).usage.completion_tokens <= 5


def refusal(**request: object) -> openai.APIStatusError | None:
    try:
        client.chat.completions.create(**{**OPTIONS, **request})
    except openai.APIStatusError as error:
        return error
    return None


assert isinstance(refusal(model="nobody"), openai.NotFoundError)
assert isinstance(refusal(max_tokens=10**9), openai.BadRequestError)
forced = refusal(tools=[TOOL], tool_choice="required")
assert isinstance(forced, openai.BadRequestError)
assert (forced.param, bool(forced.request_id)) == ("tool_choice", True)


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**OPTIONS) for _ in range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {text}
        stream = await client.chat.completions.create(**OPTIONS, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


asyncio.run(asynchronous())
