"""A conversation to a prompt, by the model's own chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from services.gateway.chat.renderer import Renderer
from services.gateway.errors import InvalidRequest
from services.gateway.text.tokenizer import Marks, TextTokenizer

Message = dict[str, Any]

# What a request may not set beside its own fields: variables that mean something to templates, and parameters of the renderer.
RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "chat_template", "template", "conversations", "time_limit_s"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        "self",  # of the method that renders
        *PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES,  # bos_token and so on, also of a model that has none
    )
)


@dataclass(frozen=True)
class Conversation:
    """What a template is rendered with; all strings are the client's."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further variables of this template


class Prompt(NamedTuple):
    text: str
    ids: list[int]


def encode_chat(renderer: Renderer, tokenizer: TextTokenizer, conversation: Conversation) -> Prompt:
    """The prompt of the conversation. Raises InvalidRequest when the template refuses, is missing, or the prompt is too long.

    Takes a thread's time: call it from one.
    """
    tokenizer.check_size("".join(message["content"] for message in conversation.messages), "messages")  # before anything that takes long
    marks = Marks.draw()
    rendered = render(renderer, tokenizer, conversation, marks)
    tokenizer.check_size(rendered, "messages")
    return Prompt(tokenizer.without_marks(rendered, marks), tokenizer.encode_chat(rendered, marks))


def render(renderer: Renderer, tokenizer: TextTokenizer, conversation: Conversation, marks: Marks) -> str:
    """The prompt's text, with marks around control tokens that the client has typed. Raises InvalidRequest."""
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    special_tokens = tokenizer.transformers.special_tokens_map
    if taken := conversation.arguments.keys() & (RESERVED | special_tokens.keys()):
        raise InvalidRequest(f"chat_template_kwargs cannot set {min(taken)}", "chat_template_kwargs", "invalid_value")
    return renderer.render(
        template,
        messages=tokenizer.mark(for_template(conversation.messages, template), marks),
        tools=tokenizer.mark(conversation.tools, marks),
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        **special_tokens,
        **tokenizer.mark(dict(conversation.arguments), marks),
    )


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
