"""Answers taken apart, however their text is cut into pieces."""

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from services.gateway.chat.output import Dialect
from services.gateway.chat.parts import CallArguments, CallBegun, message
from services.gateway.chat.tools import FORMATS, format_of

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "f": {"properties": {"a": {"type": "integer"}}},
    "fé": {},
}
A, B = {"city": "Paris {", "days": [1, {"x": 'a "quoted" }'}]}, {"é": "\\"}
CALLS = [("get_weather", A), ("f", B)]
HERMES = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>\n' for name, given in CALLS)
MISTRAL = "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": given} for name, given in CALLS])
MISTRAL_NAMED = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in CALLS)
LLAMA = "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in CALLS)
TAGGED = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis {\n</parameter>\n"
    f"<parameter=days>\n{json.dumps(A['days'])}\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=f>\n<parameter=é>\n\\\n</parameter>\n</function>\n</tool_call>"
)
LLAMA_LIST = json.dumps([{"name": name, "parameters": given} for name, given in CALLS])
FAMILIES = [
    *(("hermes", HERMES), ("hermes", TAGGED), ("mistral", MISTRAL), ("mistral", MISTRAL_NAMED)),
    *(("llama3", LLAMA), ("llama3", f"<|python_tag|>{LLAMA}"), ("llama3", LLAMA_LIST)),
]


def read(dialect: Dialect, pieces: list[str], reason: str = "stop", prompt: str = "", **options: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason. Ids are left out."""
    parser = dialect.parser(prompt=prompt, **{"tools": TOOLS, **options})
    parts = [part for piece in pieces for part in parser.push(piece)]
    last, finish_reason = parser.finish(reason)
    parts += last
    begun = [part.index for part in parts if isinstance(part, CallBegun)]
    assert begun == list(range(len(begun)))
    assert all(part.text for part in parts if not isinstance(part, CallBegun)), "no part is empty"
    told = message(parts)
    for call in told.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return told, finish_reason


def calls_of(told: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in told.get("tool_calls", [])]


@pytest.mark.parametrize("family, text", FAMILIES)
def test_calls_of_each_family(family: Any, text: str) -> None:
    told, reason = read(Dialect(family, False), [text])
    assert calls_of(told) == CALLS
    assert (told["content"], reason) == (None, "tool_calls")
    assert read(Dialect(family, False), list(text)) == (told, reason)


@given(st.data())
def test_pieces_change_nothing(data: st.DataObject) -> None:
    """Texts made of what parsers look for, cut anywhere."""
    family = data.draw(st.sampled_from(sorted(FORMATS)))
    markers = [
        HERMES,
        TAGGED,
        MISTRAL,
        LLAMA,
        LLAMA_LIST,
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<think>",
        "</think>",
        "<|python_tag|>",
    ]
    pieces_of_json = ['{"name": "f"', ', "arguments": {"a": 1}', '{"arguments": {}, "name": "g"}', '"', "\\", "{", "}", "[", "]", ",", ";"]
    tags = ["<function=f>", "<parameter=a>", "</parameter>", "</function>", "<function="]
    words = st.sampled_from([*markers, *pieces_of_json, *tags, "<", " ", "\n", "f", "é", "hello "])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    dialect, prompt = Dialect(family, data.draw(st.booleans())), data.draw(st.sampled_from(["", "<think>\n"]))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    whole = read(dialect, [text], reason, prompt)
    assert read(dialect, pieces, reason, prompt) == whole
    assert (whole[1] == "tool_calls") <= ("tool_calls" in whole[0]), "no finish reason of a call without one"


@pytest.mark.parametrize("family", sorted(FORMATS))
@example(text="\r{")
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_what_is_no_call_is_content(family: Any, text: str) -> None:
    assume(FORMATS[family].opening not in text)  # behind which nothing may have come yet
    told, reason = read(Dialect(family, False), list(text))
    assert (told["content"], reason) == (text, "stop")
    assert "tool_calls" not in told


@pytest.mark.parametrize(
    "family, text",
    [
        ("hermes", "<tool_call>call it</tool_call> no"),
        ("hermes", '<tool_call>{"nom": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS] and so on"),
        ("mistral", "[TOOL_CALLS]" + "f" * 600),
        ("llama3", '{"name": "f", "age": 3, "parameters": [1]}'),
        ("llama3", '{"city": "Paris"}'),
        ("llama3", '{"city": "Par'),
        ("llama3", 'It is {"name": "f", "parameters": {}}'),
        ("llama3", '{"name": "Alice", "age": 3}'),
        ("llama3", '{"name": "Alice", "parameters": {"age": 3}}'),
        ("llama3", '[{"name": "Alice", "parameters": {"age": 3}}, 1]'),
        ("llama3", '{"name": "", "parameters": {}}'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call><function=></function></tool_call>"),
        ("hermes", "<tool_call><function=f(1)\n></tool_call>"),
    ],
)
def test_what_looks_like_a_call_is_content(family: Any, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(Dialect(family, False), pieces) == ({"role": "assistant", "content": text, "refusal": None}, "stop")


@pytest.mark.parametrize(
    "family, text",
    [
        ("hermes", f"<tool_call><function=<b> {HERMES}"),
        ("mistral", f"[TOOL_CALLS]no call {MISTRAL}"),
        ("llama3", f'{{"name": "Alice", "parameters": {{}}}} <|python_tag|>{LLAMA}'),
    ],
)
def test_what_looks_like_a_call_hides_none_behind_it(family: Any, text: str) -> None:
    told = read(Dialect(family, False), [text])
    assert calls_of(told[0]) == CALLS
    assert read(Dialect(family, False), list(text)) == told


def test_a_marker_tells_a_call_whatever_its_name() -> None:
    for family, text in (
        ("hermes", '<tool_call>{"name": "Alice"}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "Alice", "parameters": {}}'),
    ):
        assert calls_of(read(Dialect(family, False), list(text))[0]) == [("Alice", {})]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, name, arguments",
    [
        ('{"arguments": {"a": 1}, "name": "f"}', "f", '{"a": 1}'),
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments": null}', "f", "{}"),
        ('{"name": "f", "arguments": ""}', "f", "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", '{"a": 1}'),
        ('{"type": "function", "name": "f", "parameters": {"a":1}, "id": 3}', "f", '{"a":1}'),
        ('{"name": "f\\u00e9", "arguments": {}}', "fé", "{}"),
    ],
)
def test_calls_in_other_words(text: str, name: str, arguments: str) -> None:
    for pieces in ([f"<tool_call>{text}"], list(f"<tool_call>{text}")):  # models forget the closing marker
        told, reason = read(Dialect("hermes", False), pieces)
        assert told["tool_calls"] == [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        assert reason == "tool_calls"


@pytest.mark.parametrize(
    "written, schema, value",
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": ["integer", "null"]}, 12),
        ("12", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12"),
        ("12", {"enum": [12, 13]}, 12),
        ("12", {}, "12"),
        ("True", {"type": "boolean"}, True),
        ("None", {"anyOf": [{"type": "object"}, {"type": "null"}]}, None),
        ('{"a": ["</function>"]}', {"$ref": "#/$defs/x"}, {"a": ["</function>"]}),
        ("twelve", {"type": "integer"}, "twelve"),
        ("1e400", {"type": "number"}, "1e400"),
        (" two\n\nlines\n", {"type": "string"}, " two\n\nlines\n"),
        ("<b>é</b> </para", {"type": "string"}, "<b>é</b> </para"),
        ("", {"type": "string"}, ""),
    ],
)
def test_values_in_tags_are_what_the_schema_says(written: str, schema: dict[str, Any], value: object) -> None:
    text = f"<tool_call><function=g><parameter=x>\n{written}\n</parameter></function></tool_call>"
    tools = {"g": {"properties": {"x": schema}}}
    assert calls_of(read(Dialect("hermes", False), list(text), tools=tools)[0]) == [("g", {"x": value})]


@pytest.mark.parametrize(
    "text, calls, reason",
    [
        ("<function=f></function>", [("f", "{}")], "tool_calls"),
        ("<function=f></tool_call>", [("f", "{}")], "tool_calls"),  # models forget tags
        ("<function=f><parameter=a>1</parameter></tool_call>", [("f", '{"a": 1}')], "tool_calls"),
        ("<function=f></function><function=f></function>", [("f", "{}"), ("f", "{}")], "tool_calls"),
        ("<function=f><parameter=a>1</parameter><param", [("f", '{"a": 1')], "stop"),
        ("<function=f><parameter=a>1", [("f", "")], "stop"),
        ("<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", [("f", '{"a": 1}')], "tool_calls"),
        ("<function=f>\n<parameter=a>\n1\n</tool_call>\n", [("f", '{"a": 1}')], "tool_calls"),
        ("<function=f><parameter=b></function></parameter></function>", [("f", '{"b": "</function>"}')], "tool_calls"),
        ("<function=unknown><parameter=a>1</parameter></function>", [("unknown", '{"a": "1"}')], "tool_calls"),
    ],
)
def test_calls_in_tags_that_are_not_as_they_should_be(text: str, calls: list[tuple[str, str]], reason: str) -> None:
    told, finish_reason = read(Dialect("hermes", False), list(f"<tool_call>{text}"))
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in told["tool_calls"]] == calls
    assert (told["content"], finish_reason) == (None, reason)


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": {}', '{"a": {}'),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}', '{"a": "</tool_call>"}'),
        ('{"name": "f", "arguments": {"a": 1}, "id": "</tool_call>"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
    ],
)
def test_braces_that_are_missing_or_too_many_hide_no_other_call(text: str, arguments: str) -> None:
    text = f"<tool_call>\n{text}\n</tool_call>\n{HERMES}"
    told, reason = read(Dialect("hermes", False), [text])
    (name, first), *others = ((call["function"]["name"], call["function"]["arguments"].strip()) for call in told["tool_calls"])
    assert (name, first) == ("f", arguments)
    assert [(name, json.loads(given)) for name, given in others] == CALLS
    assert (told["content"], reason) == (None, "tool_calls")
    assert read(Dialect("hermes", False), list(text)) == (told, reason)


def test_calls_in_tags_may_lack_their_opening() -> None:
    text = "I ask. " + TAGGED.replace("<tool_call>", "")
    told, reason = read(Dialect("hermes", False), [text])
    assert (told["content"], calls_of(told), reason) == ("I ask. \n", CALLS, "tool_calls")
    assert read(Dialect("hermes", False), list(text)) == (told, reason)
    for text in ("Write <function=unknown></function> or <func", "<function=f", f"a <function <b> {HERMES}"):
        content = text.removesuffix(HERMES)
        for pieces in ([text], list(text)):
            told, _ = read(Dialect("hermes", False), pieces)
            assert (told["content"], calls_of(told)) == (content, CALLS if text.endswith(HERMES) else [])


def test_what_follows_a_call_that_is_none_is_not_lost() -> None:
    text = '<tool_call>{"x": {</tool_call> Sorry.'
    for pieces in ([text], list(text)):
        assert read(Dialect("hermes", False), pieces) == ({"role": "assistant", "content": text, "refusal": None}, "stop")


def test_arguments_go_on_as_they_come() -> None:
    parser = Dialect("hermes", False).parser(prompt="", tools=TOOLS)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    begun, first = parser.push('{"a": ')
    assert (begun, first) == (CallBegun(0, "f", begun.id if isinstance(begun, CallBegun) else ""), CallArguments(0, '{"a": '))
    assert parser.push("1}") == [CallArguments(0, "1}")]
    assert parser.push("}</tool_call>") == []


def test_an_answer_that_is_cut() -> None:
    before_its_name = read(Dialect("hermes", False), ['Hello <tool_call>{"na'], "stop")
    assert before_its_name == ({"role": "assistant", "content": "Hello ", "refusal": None}, "stop")
    told, reason = read(Dialect("hermes", False), ['<tool_call>{"name": "f", "arguments": {"a": "b </tool'], "length")
    assert told["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": '{"a": "b </tool'}}]
    assert (told["content"], reason) == (None, "length")
    assert read(Dialect("hermes", False), ['<tool_call>{"name": "f", "arguments": {}'], "stop")[1] == "stop"


def test_text_around_calls() -> None:
    told, _ = read(Dialect("hermes", False), [f"I ask. {HERMES}\n"])
    assert told["content"] == "I ask. "
    assert read(Dialect("hermes", False), [f"\n\n{HERMES}"])[0]["content"] is None
    assert read(Dialect("hermes", False), ["\n\n"])[0]["content"] == "\n\n"
    assert read(Dialect("hermes", False), [f"{HERMES}Done."])[0]["content"] == "\nDone."


def test_tool_10_one_call_where_more_are_not_wanted() -> None:
    told, reason = read(Dialect("hermes", False), list(HERMES), parallel=False)
    assert (calls_of(told), reason) == (CALLS[:1], "tool_calls")


def test_tool_07_no_tools_no_calls() -> None:
    assert read(Dialect("hermes", False), [HERMES], tools={})[0]["content"] == HERMES


@pytest.mark.parametrize(
    "prompt, text, reasoning, content",
    [
        ("", "<think>\nso it is\n</think>\n\nParis", "so it is", "Paris"),
        ("<think>\n", "so it is\n</think>\n\nParis", "so it is", "Paris"),
        ("<think>\n\n</think>\n\n", "Paris", None, "Paris"),
        ("", "\n<think></think>Paris", None, "Paris"),
        ("", " Paris <think>", None, " Paris <think>"),
        ("<think>", "so it", "so it", None),
        ("", "<think>a </thin b</think> <think>", "a </thin b", "<think>"),
        ("", "<thi", None, "<thi"),
    ],
)
def test_reasoning_is_apart(prompt: str, text: str, reasoning: str | None, content: str | None) -> None:
    for pieces in ([text], list(text)):
        told, reason = read(Dialect(None, True), pieces, prompt=prompt)
        assert (told.get("reasoning_content"), told["content"], reason) == (reasoning, content, "stop")


def test_reasoning_then_calls() -> None:
    text = f"<think>I <tool_call> it</think>\n\n{HERMES}"
    told, reason = read(Dialect("hermes", True), list(text))
    assert (told["reasoning_content"], told["content"], calls_of(told)) == ("I <tool_call> it", None, CALLS)
    assert reason == "tool_calls"


@pytest.mark.parametrize("calls", [HERMES, TAGGED])
def test_calls_end_reasoning_that_has_no_end(calls: str) -> None:
    text = f"<think>I look <tool_call> it up.\n{calls}"
    for pieces in ([text], list(text)):
        told, reason = read(Dialect("hermes", True), pieces)
        assert (told["reasoning_content"], told["content"], calls_of(told)) == (text.removeprefix("<think>").rstrip(), None, CALLS)
        assert reason == "tool_calls"
    assert len(calls_of(read(Dialect("hermes", True), [text], parallel=False)[0])) == 1


@pytest.mark.parametrize(
    "text, reason",
    [
        (HERMES, "length"),
        (f"{HERMES} Or not?", "stop"),
        (f"{HERMES}</think>", "stop"),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "stop"),
        ("<tool_call>call it</tool_call>", "stop"),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', "stop"),
    ],
)
def test_what_is_thought_is_no_call(text: str, reason: str) -> None:
    told, finish_reason = read(Dialect("hermes", True), [text], reason, prompt="<think>")
    assert ("tool_calls" in told, finish_reason) == (False, reason)


def test_the_template_tells_the_dialect() -> None:
    assert format_of("{{ messages }}") is None
    assert format_of("{% if tools %}<tool_call>") == "hermes"
    assert format_of("{% if tools %}[AVAILABLE_TOOLS] ... [TOOL_CALLS]") == "mistral"
    assert format_of('{% if tools %}{"name": function name, "parameters": dictionary}') == "llama3"
    assert Dialect.of("{% if tools %}<tool_call>{% endif %}</think>") == Dialect("hermes", True)
    assert Dialect.of("{% if tools %}<tool_call></think>", "off", "off") == Dialect(None, False)
    assert Dialect.of(None, "mistral", "think") == Dialect("mistral", True)
    assert Dialect("mistral", False).shown(tools=True) >= {"[TOOL_CALLS]"}
    assert not Dialect("mistral", False).shown(tools=False)
