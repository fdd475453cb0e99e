"""Fields of other servers: what would change the answer is refused by name, what asks for nothing is taken."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.errors import InvalidRequest
from services.gateway.openai.foreign import ABSENT, BY_ENDPOINT, HINTS, PENALTIES, WINDOW
from services.gateway.openai.validation import chat_request, completion_request
from tests.services.gateway.conftest import Stack, assert_error

READ = {"messages": chat_request, "prompt": completion_request}
NEEDED = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
OF_SAMPLERS = ["typical_p", "top_a", "tfs", "mirostat", "repeat_penalty", "dry_multiplier", "xtc_probability", "length_penalty"]
OF_GRAMMARS = ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf", "json_schema"]
OF_ENDS = ["stop_sequences", "stop_strings", "eos_token_id", "max_new_tokens", "max_output_tokens", "reasoning_budget"]
HARMLESS = {
    "dry_base": 1.75,
    "dry_sequence_breakers": ["a"],
    "xtc_threshold": 0.1,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "adaptive_decay": 0.9,
    "repeat_last_n": 64,
    "cache_prompt": True,
    "id_slot": 3,
    "priority": 1,
    "user_id": "u",
    "spaces_between_special_tokens": True,
    "extra_body": {"a": 1},
}


def read(endpoint: str, **fields: Any) -> None:
    READ[endpoint](json.dumps({"model": "tiny", endpoint: NEEDED[endpoint], **fields}).encode())


@pytest.mark.parametrize("endpoint", READ)
def test_every_field_is_refused_by_name_and_taken_where_it_asks_for_nothing(endpoint: str) -> None:
    for field, neutral in BY_ENDPOINT[endpoint].items():
        for value in (*ABSENT, *neutral, *(float(each) for each in neutral if isinstance(each, int) and not isinstance(each, bool))):
            read(endpoint, **{field: value})
        for value in (0.37, "x", ["x"], {"type": "x"}, *({True, False}.difference(each for each in neutral if isinstance(each, bool)))):
            with pytest.raises(InvalidRequest, match=field) as refused:
                read(endpoint, **{field: value})
            assert (refused.value.param, refused.value.code) == (field, "unsupported_value")
    assert {*OF_SAMPLERS, *OF_GRAMMARS, *OF_ENDS, "use_beam_search", "adaptive_target"} <= BY_ENDPOINT[endpoint].keys()
    read(endpoint, **HARMLESS)


def test_penalties_over_fewer_tokens_are_refused_where_there_are_penalties() -> None:
    for penalty, neutral in PENALTIES.items():
        read("prompt", **{penalty: neutral, WINDOW: 64})
        read("prompt", **{penalty: 1.5, WINDOW: -1})
        with pytest.raises(InvalidRequest) as refused:
            read("prompt", **{penalty: 1.5, WINDOW: 64})
        assert refused.value.param == WINDOW


def test_the_page_of_the_api_tells_of_all_what_is_taken() -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for endpoint, other in (("messages", "completions: "), ("prompt", "chats: ")):
        own = [row for row in reversed(rows) if len(row) == 2 and not row[0].startswith(other)]  # the first row of a name counts
        told = {name: row[1] for row in own for name in re.findall(r"`(\w+)`", row[0])}
        for name, neutral in BY_ENDPOINT[endpoint].items():
            assert all(json.dumps(value) in told[name] for value in neutral), name
        assert WINDOW in told
    assert {*HINTS} <= {*BY_ENDPOINT["messages"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_refused_on_both_endpoints(stack: Stack, stream: bool) -> None:
    for ask in (stack.chat, stack.complete):
        error = assert_error(await ask(stream=stream, enable_thinking=False), 400, "enable_thinking", "unsupported_value")
        assert "chat_template_kwargs" in error["message"]
        assert_error(await ask(stream=stream, dry_multiplier=0.8), 400, "dry_multiplier", "unsupported_value")
    assert not stack.scheduler.submits
