"""The text of one chat answer, taken apart: what the model thought, what it says, which tools it calls."""

import re
from dataclasses import dataclass
from typing import Literal

from services.gateway.chat.markers import split_at
from services.gateway.chat.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.gateway.chat.tagged_calls import Schemas
from services.gateway.chat.tools import FORMATS, FormatName, ToolParser, format_of

THINK, END_OF_THINKING = "<think>", "</think>"

ITERATED_ARGUMENTS = re.compile(r"arguments\s*(?:\|\s*|\.)items")
CONCATENATED_ARGUMENTS = re.compile(r"""(?:\.arguments|\[['"]arguments['"]\])\s*[+~]""")  # without a filter that writes them

ToolSetting = Literal["auto", "hermes", "llama3", "mistral", "off"]
ReasoningSetting = Literal["auto", "think", "off"]


@dataclass(frozen=True)
class Dialect:
    """How a model writes what is not plain text."""

    tools: FormatName | None
    thinks: bool
    # For the arguments of calls in a conversation, and nothing else:
    takes_objects: bool = False
    takes_text: bool = False

    @classmethod
    def of(cls, template: str | None, tools: ToolSetting = "auto", reasoning: ReasoningSetting = "auto") -> "Dialect":
        """By the settings or, where they say auto, by the chat template."""
        template = template or ""
        found = format_of(template) if tools == "auto" else None if tools == "off" else tools
        thinks = END_OF_THINKING in template if reasoning == "auto" else reasoning == "think"
        takes_objects = bool(ITERATED_ARGUMENTS.search(template))
        takes_text = not takes_objects and bool(CONCATENATED_ARGUMENTS.search(template))
        return cls(found, thinks, takes_objects, takes_text)

    def parser(self, *, prompt: str, continued: str = "", tools: Schemas, parallel: bool = True) -> "OutputParser":
        """For an answer to the rendered prompt; `continued`: the message that it goes on with; `tools`: those that it may call;
        `parallel`: more than one."""
        calls = ToolParser(FORMATS[self.tools], tools) if tools and self.tools else None
        opened = prompt[-100:].rstrip().endswith(THINK) or continued.rfind(THINK) > continued.rfind(END_OF_THINKING)
        return OutputParser(calls, self.thinks, is_thinking=self.thinks and opened, parallel=parallel)

    def shown(self, *, tools: bool) -> frozenset[str]:
        """Control tokens that the parser needs to see."""
        thinking = (THINK, END_OF_THINKING) if self.thinks else ()
        return frozenset((*thinking, *(FORMATS[self.tools].markers if tools and self.tools else ())))


class ThinkingParser:
    """Splits off what stands between <think> and </think> at the beginning of an answer, without the blanks around."""

    def __init__(self, is_thinking: bool) -> None:
        """is_thinking: the prompt has opened it."""
        self.is_thinking = is_thinking
        self._is_over = False
        self._has_begun = False  # something but blanks has been thought, or said afterwards
        self._text = ""

    def push(self, text: str) -> tuple[str, str]:
        """More reasoning, more of the rest."""
        if self._is_over and self._has_begun:
            return "", text
        self._text += text
        if not (self.is_thinking or self._is_over):
            start = self._text.lstrip()
            if THINK.startswith(start):  # nothing else has come
                return "", ""
            self.is_thinking = start.startswith(THINK)
            self._is_over = self._has_begun = not self.is_thinking
            if self._is_over:
                return "", self._take()
            self._text = start.removeprefix(THINK)
        reasoning = self._think() if self.is_thinking else ""
        return reasoning, self._speak() if self._is_over else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        text = self._take().rstrip() if self.is_thinking or self._is_over else self._take()
        return (text, "") if self.is_thinking else ("", text)

    def _think(self) -> str:
        before, end, rest = split_at(self._text, END_OF_THINKING)
        if not self._has_begun:
            before = before.lstrip()
        shown = before.rstrip()
        self._has_begun = self._has_begun or bool(shown)
        if end:
            self.is_thinking, self._is_over, self._has_begun = False, True, False
            self._text = rest
        else:
            self._text = before[len(shown) :] + rest
        return shown

    def _speak(self) -> str:
        self._text = self._text.lstrip()
        self._has_begun = bool(self._text)
        return self._take()

    def _take(self) -> str:
        text, self._text = self._text, ""
        return text


class OutputParser:
    """One answer. However its text is cut into pieces, the parts together are the same."""

    def __init__(self, tools: ToolParser | None, thinks: bool, *, is_thinking: bool, parallel: bool) -> None:
        self._thinking = ThinkingParser(is_thinking) if thinks else None
        self._tools = tools
        self._parallel = parallel
        self._reasoning: list[str] = []
        self._blanks = ""  # at the beginning of the content or after a call: perhaps all that is there
        self._holds_blanks = tools is not None

    @property
    def has_thought(self) -> bool:
        """Whether there is any reasoning."""
        return bool(self._reasoning)

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with this piece."""
        if self._thinking is None:
            return self._answer(text)
        return self._thought(*self._thinking.push(text))

    def finish(self, reason: str) -> tuple[list[Part], str]:
        """The last parts, and the finish reason: `tool_calls` for an answer that has stopped after calling, in full."""
        parts: list[Part] = []
        if self._thinking is not None:
            parts = self._thought(*self._thinking.finish())
        if self._tools is None:
            return parts, reason
        if self._thinking is not None and self._thinking.is_thinking and reason == "stop":  # models call without having ended it
            parts += self._told(self._tools.push(self._tools.calls_at_end("".join(self._reasoning))))
        parts += self._told(self._tools.finish())
        if self._blanks and not self._tools.calls:
            parts.append(Content(self._blanks))
        called = self._tools.calls and not self._tools.is_reading
        return parts, "tool_calls" if called and reason == "stop" else reason

    def _thought(self, reasoning: str, rest: str) -> list[Part]:
        if not reasoning:
            return self._answer(rest)
        self._reasoning.append(reasoning)
        return [Reasoning(reasoning), *self._answer(rest)]

    def _answer(self, text: str) -> list[Part]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._told(self._tools.push(text))

    def _told(self, parts: list[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                told += self._content(part.text)
            elif isinstance(part, CallBegun | CallArguments) and (self._parallel or not part.index):
                self._blanks, self._holds_blanks = "", True
                told.append(part)
        return told

    def _content(self, text: str) -> list[Part]:
        if self._holds_blanks:
            text, self._blanks = self._blanks + text, ""
            if text.isspace():
                self._blanks = text
                return []
            self._holds_blanks = False
        return [Content(text)]
