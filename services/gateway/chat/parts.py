"""What the text of a chat answer is made of, and how the wire writes it: content, reasoning, calls of tools."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str

    def delta(self) -> dict[str, Any]:
        return {"content": self.text}


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str

    def delta(self) -> dict[str, Any]:
        return {"reasoning_content": self.text}


@dataclass(frozen=True)
class CallBegun:
    """A call: its place among the answer's calls, from 0, and the function's name. The id is new."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def delta(self) -> dict[str, Any]:
        call = {"index": self.index, "id": self.id, "type": "function", "function": {"name": self.name, "arguments": ""}}
        return {"tool_calls": [call]}


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text that holds the arguments of the call at `index`."""

    index: int
    text: str

    def delta(self) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.index, "function": {"arguments": self.text}}]}


Part = Content | Reasoning | CallBegun | CallArguments


def message(parts: Iterable[Part]) -> dict[str, Any]:
    """The message of a whole answer. Its content is null when there is none beside calls or reasoning."""
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegun(index, name, id):
                calls[index] = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    told: dict[str, Any] = {"role": "assistant", "content": content if content or not (calls or reasoning) else None, "refusal": None}
    if reasoning:
        told["reasoning_content"] = reasoning
    if calls:
        told["tool_calls"] = list(calls.values())
    return told
