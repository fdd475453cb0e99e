"""Calls of tools in the text of an answer, as the model families write them.

Hermes, Qwen   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, once for each call; Qwen3-Coder has tags in the place of JSON
Llama 3        the answer is {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>; more follow after a semicolon or in a list
Mistral        [TOOL_CALLS] before a list of {"name": "f", "arguments": {...}}, or, later, before each f[ARGS]{...}

The text comes in pieces; arguments go on as they come, in the model's own words. What turns out to be no call is content again. So is,
where no marker has announced a call, an object whose name is no tool's: the answer itself may be JSON.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pydantic_core import from_json

from services.gateway.chat.markers import is_start, split_at
from services.gateway.chat.parts import CallArguments, CallBegun, Content, Part
from services.gateway.chat.tagged_calls import FUNCTION, Schemas, TaggedCallReader

BLANKS = " \t\r\n"
MAX_AT_END = 1 << 15  # characters of calls that are read at once, while others wait: up to 30 ms

# A call up to its arguments, whose brace is next.
OBJECT_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]{1,200})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
NAMED_HEAD = re.compile(r"(?P<name>[\w.-]{1,200})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*(?=\{)")
BEGUN_NAMED_HEAD = re.compile(r"[\w.-]{1,200}(?:\[[A-Z_]*\]?\w{0,64}){0,2}\s*")  # what may become one


@dataclass(frozen=True)
class Format:
    """How a family writes calls: between `opening` and `closing`, with blanks and `separators` around them."""

    opening: str
    closing: str = ""
    separators: str = ""
    whole_answer: bool = False  # a call may stand at the very beginning, without `opening`
    named: bool = False  # a call may be a name before its arguments
    tagged: bool = False  # a call may be in tags
    markers: tuple[str, ...] = ()  # control tokens that must stay visible


FormatName = Literal["hermes", "llama3", "mistral"]
FORMATS: dict[FormatName, Format] = {
    "hermes": Format(  # models write a brace too many, too
        "<tool_call>", closing="</tool_call>", separators="}", tagged=True, markers=("<tool_call>", "</tool_call>")
    ),
    "llama3": Format("<|python_tag|>", separators="[];,", whole_answer=True, markers=("<|python_tag|>",)),
    "mistral": Format("[TOOL_CALLS]", separators="[],", named=True, markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
}


def format_of(template: str) -> FormatName | None:
    """The format that a chat template shows to its model; None if it knows no tools."""
    if "tools" not in template:
        return None
    for name, form in FORMATS.items():
        if form.opening in template:
            return name
    return "llama3" if '"parameters"' in template else None


class Nesting:
    """Follows the brackets of a JSON text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self.in_string = False
        self._depth = depth
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The position in this piece behind the bracket that closes the outermost one; None when it has not come."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self.in_string:
                self._escaped = character == "\\"
                self.in_string = character != '"'
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


class CallReader:
    """One call, from its first character on."""

    def __init__(self, index: int, names: Collection[str] | None) -> None:
        """names: of the tools, where nothing else tells a call from what has its shape."""
        self.begun = False  # its name has been told
        self.held = ""  # what may still turn out to be no call
        self._index = index
        self._names = names
        self._nesting = Nesting()
        self._tail: Nesting | None = None  # behind the arguments: the rest of the object
        self._in_arguments = False

    @property
    def reads_on(self) -> bool:
        """Whether the closing marker would be text of the call, as any other: in a string."""
        nesting = self._nesting if self._in_arguments or self._tail is None else self._tail
        return nesting.in_string

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """What is certain and, once the call has ended, what follows it. No call: `begun` is False, and `held` is content."""
        if self.begun:
            return self._arguments(text)
        self.held += text
        named = not self.held.startswith("{")
        if head := (NAMED_HEAD if named else OBJECT_HEAD).match(self.held):
            if not self._is_tool(head["name"]):
                return self._no_call()
            rest, self.held, self.begun, self._in_arguments = self.held[head.end() :], "", True, True
            self._nesting, self._tail = Nesting(), None if named else Nesting(depth=1)
            parts, follows = self._arguments(rest)
            return [CallBegun(self._index, head["name"]), *parts], follows
        if named:
            return ([], None) if BEGUN_NAMED_HEAD.fullmatch(self.held) else self._no_call()
        end = self._nesting.end(text)
        if end is None:
            return [], None
        cut = len(self.held) - len(text) + end
        self.held, follows = self.held[:cut], self.held[cut:]
        return self._whole(), follows

    def _arguments(self, text: str) -> tuple[list[Part], str | None]:
        parts: list[Part] = []
        if self._in_arguments:
            end = self._nesting.end(text)
            if text:
                parts.append(CallArguments(self._index, text[:end]))
            if end is None:
                return parts, None
            self._in_arguments, text = False, text[end:]
        if self._tail is None:
            return parts, text
        end = self._tail.end(text)
        return parts, None if end is None else text[end:]

    def _whole(self) -> list[Part]:
        """A call whose keys stand in another order, or that has no arguments."""
        try:
            call = from_json(self.held)
        except ValueError:
            return []
        arguments = call.get("arguments", call.get("parameters")) or {}  # models write null and "" for none
        if not self._is_tool(call.get("name")) or not isinstance(arguments, str | dict):
            return []
        self.held, self.begun = "", True
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [CallBegun(self._index, call["name"]), CallArguments(self._index, written)]

    def _no_call(self) -> tuple[list[Part], str]:
        """How much has come depends on how the text is cut: behind the first character all may be something else."""
        self.held, follows = self.held[:1], self.held[1:]
        return [], follows

    def _is_tool(self, name: object) -> bool:
        return isinstance(name, str) and bool(name) and (self._names is None or name in self._names)


class ToolParser:
    """Splits the text of one answer into content and calls."""

    def __init__(self, form: Format, tools: Schemas) -> None:
        self.calls = 0
        self.is_reading = False  # the last call has not ended
        self._form, self._tools = form, tools
        self._text = ""  # not yet looked at
        self._marker = ""  # the opening whose call has not begun
        self._skipped = ""  # between it and what may be the call
        self._is_between = form.whole_answer  # where a call may begin: after an opening, after a call
        self._reader: CallReader | TaggedCallReader | None = None

    def push(self, text: str) -> list[Part]:
        """The parts that are certain."""
        self._text += text
        parts: list[Part] = []
        while self._text and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What is left at the end of the answer. Of a call whose name has not come nothing is, if an opening announced it."""
        parts: list[Part] = []
        if self._reader is not None:  # which has not seen what could have become the closing marker
            self._take(self._reader, self._reader.push(self._text), parts)
        if isinstance(self._reader, TaggedCallReader) and self._take(self._reader, self._reader.finish(), parts):
            parts += self.push("")
        self.is_reading = self._reader is not None
        if self._marker:
            return parts
        if self._reader is not None:
            left = "" if self._reader.begun else self._skipped + self._reader.held
        else:
            left = self._text.strip(BLANKS + self._form.separators) if self._is_between and self.calls else self._text
        return [*parts, Content(left)] if left else parts

    def calls_at_end(self, text: str) -> str:
        """The calls of tools with which a text ends; "" where anything follows them, and where they are very long."""
        opening, closing = self._form.opening, self._form.closing
        begin = end = len(text.rstrip())
        while closing and text.endswith(closing, 0, end) and (opened := text.rfind(opening, 0, end)) >= 0:
            begin = end = opened
            while text[end - 1 : end].isspace():
                end -= 1
        if len(text) - begin > MAX_AT_END:
            return ""
        parser = ToolParser(self._form, self._tools)
        parts = [*parser.push(text[begin:]), *parser.finish()]
        said = any(part.text.strip() for part in parts if isinstance(part, Content))
        known = all(part.name in self._tools for part in parts if isinstance(part, CallBegun))
        return text[begin:] if known and not said and not parser.is_reading else ""

    def _step(self, parts: list[Part]) -> bool:
        """Takes some of the text; False when more must come first."""
        if self._reader is not None:
            return self._read(self._reader, parts)
        if self._is_between:
            return self._begin(parts)
        tags = (FUNCTION,) if self._form.tagged else ()  # models forget the opening, too
        before, marker, self._text = split_at(self._text, self._form.opening, *tags)
        if before:
            parts.append(Content(before))
        if marker in tags:
            self._skipped, self._text = "", marker + self._text
            self._reader = TaggedCallReader(self.calls, self._tools, self._tools)
            return True
        self._marker, self._is_between = marker, bool(marker)
        return bool(marker)

    def _begin(self, parts: list[Part]) -> bool:
        form, rest = self._form, self._text.lstrip(BLANKS)
        while rest and rest[0] in form.separators and not rest.startswith(form.opening) and not is_start(rest, form.opening):
            rest = rest[1:].lstrip(BLANKS)
        if is_start(rest, form.opening) or (form.closing and is_start(rest, form.closing)) or (form.tagged and is_start(rest, FUNCTION)):
            return False
        if rest.startswith(form.opening):
            self._text, self._marker = rest.removeprefix(form.opening), form.opening
        elif form.closing and rest.startswith(form.closing):
            self._text, self._marker, self._is_between = rest.removeprefix(form.closing), "", False
        elif rest[0] == "{" or (form.named and self._marker and BEGUN_NAMED_HEAD.match(rest)):
            self._skipped, self._text = self._text[: -len(rest)], rest
            self._reader = CallReader(self.calls, self._tools if form.whole_answer and not self._marker else None)
        elif form.tagged and rest.startswith(FUNCTION):
            self._skipped, self._text = self._text[: -len(rest)], rest
            self._reader = TaggedCallReader(self.calls, self._tools, None)
        else:
            if self._marker:
                parts.append(Content(self._marker))
            elif self.calls:
                self._text = rest
            self._marker, self._is_between = "", False
        return True

    def _read(self, reader: CallReader | TaggedCallReader, parts: list[Part]) -> bool:
        """The closing marker ends a call wherever it is no text of it: models forget braces."""
        closing = self._form.closing
        before, marker, after = split_at(self._text, closing) if closing else (self._text, "", "")
        if self._take(reader, reader.push(before), parts):
            self._text += marker + after
            return True
        if marker and reader.reads_on:
            ended = self._take(reader, reader.push(marker), parts)
            self._text += after
            return ended or bool(after)
        self._text = marker + after
        if marker:
            self._end(reader, parts)
        return bool(marker)

    def _take(self, reader: CallReader | TaggedCallReader, read: tuple[list[Part], str | None], parts: list[Part]) -> bool:
        """Whether the call has ended with what was read; `_text` is what follows it then."""
        found, rest = read
        self._text = rest or ""
        parts += found
        if rest is None:
            return False
        self._end(reader, parts)
        return True

    def _end(self, reader: CallReader | TaggedCallReader, parts: list[Part]) -> None:
        if reader.begun:
            self.calls += 1
        else:
            parts.append(Content(self._marker + self._skipped + reader.held))
        self._reader, self._marker, self._is_between = None, "", reader.begun
