"""Calls in tags, as Qwen3-Coder writes them: <function=f><parameter=a>1</parameter></function>.

The values have no quotes: what each is, only the tool's schema tells.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import from_json

from services.gateway.chat.markers import is_start, split_at
from services.gateway.chat.parts import CallArguments, CallBegun, Part

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION, END_OF_PARAMETER = "</function>", "</parameter>"
NAMED_TAG = re.compile(r"<(?:function|parameter)=(?P<name>[^<>\n]{1,200})>")
BEGUN_TAG = re.compile(r"<(?:function|parameter)=[^<>\n]{0,200}")
LAST_TAGS = re.compile(r"(?:</function>\s*)?(?:</tool_call>\s*)?\Z")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool, by its name


class TaggedCallReader:
    """One call, from its first tag on. Arguments are told one at a time: a value is known at its end."""

    reads_on = True  # what the closing marker means is told from the tags

    def __init__(self, index: int, schemas: Schemas, names: Collection[str] | None) -> None:
        """names: of the tools, where nothing else tells a call from what has its shape."""
        self.begun = False  # its name has been told
        self.held = ""  # not yet looked at
        self._index = index
        self._schemas, self._names = schemas, names
        self._parameters: Mapping[str, Any] = {}
        self._name: str | None = None  # of the parameter whose value is being read
        self._value: list[str] = []
        self._told = 0  # arguments

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """What is certain and, once the call has ended, what follows it. No call: `begun` is False, and `held` is content."""
        self.held += text
        parts: list[Part] = []
        while True:
            if self._name is not None:
                if not self._read_value(parts, self._name):
                    return parts, None
                continue
            rest = self.held.lstrip()
            if tag := NAMED_TAG.match(rest):
                if tag[0].startswith(FUNCTION) == self.begun or not (self.begun or self._is_tool(tag["name"])):
                    break
                self.held = rest[tag.end() :]
                self._open(tag["name"], parts)
            elif is_start(rest, FUNCTION) or is_start(rest, PARAMETER) or is_start(rest, END_OF_FUNCTION) or BEGUN_TAG.fullmatch(rest):
                return parts, None
            else:
                break
        return (self._close(parts), self._rest()) if self.begun else (parts, self._no_call())

    def finish(self) -> tuple[list[Part], str | None]:
        """The same at the end of the answer, where it is clear that a value has ended without its tag: models forget it."""
        text = "".join(self._value) + self.held
        tags = LAST_TAGS.search(text)
        if self._name is None or not tags or not tags[0]:
            return [], None
        self._value, self.held = [], ""
        return self.push(f"{text[: tags.start()]}{END_OF_PARAMETER}{tags[0]}")

    def _is_tool(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _open(self, name: str, parts: list[Part]) -> None:
        if self.begun:
            self._name, self._value = name, []
            return
        self.begun = True
        properties = self._schemas.get(name, {}).get("properties")
        self._parameters = properties if isinstance(properties, dict) else {}
        parts.append(CallBegun(self._index, name))

    def _read_value(self, parts: list[Part], name: str) -> bool:
        """Whether it has ended."""
        before, end, self.held = split_at(self.held, END_OF_PARAMETER)
        self._value.append(before)
        if not end:
            return False
        value = "".join(self._value).removeprefix("\n").removesuffix("\n")
        written = f"{json.dumps(name, ensure_ascii=False)}: {_json(value, self._parameters.get(name))}"
        parts.append(CallArguments(self._index, f"{', ' if self._told else '{'}{written}"))
        self._told += 1
        self._name = None
        return True

    def _close(self, parts: list[Part]) -> list[Part]:
        return [*parts, CallArguments(self._index, "}" if self._told else "{}")]

    def _no_call(self) -> str:
        """How much has come depends on how the text is cut: behind the first character all may be something else."""
        self.held, follows = self.held[:1], self.held[1:]
        return follows

    def _rest(self) -> str:
        """What follows the call; models forget its last tag."""
        rest, self.held = self.held.lstrip().removeprefix(END_OF_FUNCTION), ""
        return rest


def _json(value: str, schema: object) -> str:
    """The JSON text of a value: what its schema calls a string, or says nothing of, and what is no JSON, is a string."""
    if not _may_be_string(schema):
        try:
            return json.dumps(from_json(PYTHON_WORDS.get(value.strip(), value), allow_inf_nan=False), ensure_ascii=False, allow_nan=False)
        except ValueError:
            pass
    return json.dumps(value, ensure_ascii=False)


def _may_be_string(schema: object) -> bool:
    if not isinstance(schema, dict):
        return True
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return any(map(_may_be_string, schema[key]))
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    kind = schema.get("type")
    return "string" in kind if isinstance(kind, list) else kind == "string" or (kind is None and "$ref" not in schema)
