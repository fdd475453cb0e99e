"""A conversation to a prompt, by the model's own chat template, rendered by `transformers` in its sandbox."""

from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway.errors import InvalidRequest
from services.gateway.text.tokenizer import Marks, TextTokenizer

Message = dict[str, Any]


def encode_chat(tokenizer: TextTokenizer, messages: list[Message]) -> list[int]:
    """Token ids of the conversation up to where the assistant speaks. Raises InvalidRequest when the template refuses or is missing.

    Takes a thread's time: call it from one.
    """
    tokenizer.check_size("".join(message["content"] for message in messages), "messages")  # before anything that takes long
    marks = Marks.draw()
    rendered = render(tokenizer, tokenizer.mark(messages, marks))
    tokenizer.check_size(rendered, "messages")
    return tokenizer.encode_chat(rendered, marks)


def render(tokenizer: TextTokenizer, messages: list[Message]) -> str:
    """The prompt's text. Raises InvalidRequest, with the template's own words where it refuses on purpose."""
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    try:
        rendered: tuple[list[str], Any] = render_jinja_template(  # type: ignore[assignment]  # annotated wrongly there
            conversations=[for_template(messages, template)],
            chat_template=template,
            add_generation_prompt=True,
            **tokenizer.transformers.special_tokens_map,
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # whatever a template can raise
        raise InvalidRequest(f"the chat template refuses these messages: {str(error)[:200]}", "messages") from error
    return rendered[0][0]


def for_template(messages: list[Message], template: str) -> list[Message]:
    """The messages in the roles that the template knows: without a word of `developer` in it, those speak as `system`.

    Templates often take one system message at the head only, so those that lead become one.
    """
    if "developer" in template or all(message["role"] != "developer" for message in messages):
        return messages
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    leading = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if leading < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:leading])
    return [{**messages[0], "content": text}, *messages[leading:]]
