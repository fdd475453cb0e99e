"""LangChain's chat model: invoke, stream, batch, bound tools. Arguments: URL, model."""

# It runs where other packages are installed.
# mypy: ignore-errors

import asyncio
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
QUESTION = "What is the capital of France?"


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=20)
answer = model.invoke([("system", "Be brief."), ("user", QUESTION)])
assert answer.usage_metadata["total_tokens"] > 0
assert answer.response_metadata["finish_reason"] in ("stop", "length")
alone = model.invoke(QUESTION).content
chunks = list(model.stream(QUESTION, stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == alone
assert any(chunk.usage_metadata for chunk in chunks)
assert [each.content for each in model.batch([QUESTION] * 3)] == [alone] * 3
assert asyncio.run(model.ainvoke(QUESTION)).content == alone
assert model.bind_tools([weather]).invoke(QUESTION).type == "ai"
conversation = [
    ("user", QUESTION),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
assert model.bind_tools([weather]).invoke(conversation).type == "ai"
assert isinstance(OpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=5).invoke("Once upon"), str)
