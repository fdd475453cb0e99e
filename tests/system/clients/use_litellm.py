"""LiteLLM, with the endpoint as an OpenAI-compatible provider. Arguments: URL, model."""

# It runs where other packages are installed.
# mypy: ignore-errors

import asyncio
import sys

import litellm

URL, MODEL = sys.argv[1:]
OPTIONS = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 20,
    "temperature": 0,
}

whole = litellm.completion(**OPTIONS)
text = whole.choices[0].message.content
assert whole.usage.completion_tokens > 0
for provider in ("hosted_vllm", "openai"):
    chunks = list(litellm.completion(**{**OPTIONS, "model": f"{provider}/{MODEL}"}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert asyncio.run(litellm.acompletion(**OPTIONS)).choices[0].message.content == text
try:
    litellm.completion(**{**OPTIONS, "model": "openai/nobody"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not served was answered")
