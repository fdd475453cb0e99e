"""Every fault is told in OpenAI's error object, with its status, field and code."""

import asyncio
import codecs
import gzip
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.errors import InvalidRequest
from services.gateway.openai.schemas import ChatRequest
from services.gateway.openai.validation import parse
from shared.protocol.generation_pb2 import RejectReason
from tests.services.gateway.conftest import ANY, Stack, assert_error
from tests.services.gateway.scripted_scheduler import ERROR
from tests.tiny import tiny_tokenizer

HI = [{"role": "user", "content": "hi"}]
V = 384
PADDING = 370  # an id that the embedding has and the tokenizer has not
TOOL = {"type": "function", "function": {"name": "f"}}

CHAT_FAULTS: list[tuple[dict[str, Any], str | None, str | None]] = [  # fields beside model and messages, param, code
    ({"model": None}, None, None),
    ({"model": ""}, None, None),
    ({"model": 7}, None, ANY),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [*HI, {"role": "banana", "content": "hi"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing_required_parameter"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
        "messages[0].content[0].refusal",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "tool", "content": "2"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call", "unsupported_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": -1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 999999}, "temperature", "decimal_above_max_value"),
    ({"top_p": -1}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"min_p": 1.1}, "min_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"presence_penalty": 2.1}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "decimal_below_min_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"seed": 2**70}, "seed", "integer_above_max_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -5}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 1e30}, "max_tokens", "invalid_type"),
    ({"max_tokens": 10**12}, "messages", "context_length_exceeded"),
    ({"max_tokens": 2**63}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_parameter_combination"),
    ({"messages": [{"role": "user", "content": "hi " * 300}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "hi" * 10**6}]}, "messages", "context_length_exceeded"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": 10**9}, "n", "integer_above_max_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "array_above_max_length"),
    ({"stop": ""}, "stop", ANY),
    ({"stop": ["a", ""]}, "stop", ANY),
    ({"stop": ["a", 1]}, "stop", "invalid_type"),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"stop": "x" * 10**6}, "stop", "string_above_max_length"),
    ({"stop_token_ids": [V]}, "stop_token_ids", ANY),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ANY),
    ({"stop_token_ids": "a"}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids", "array_above_max_length"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "object_above_max_properties"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "string_above_max_length"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "property_name_above_max_length"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    ({"tools": []}, "tools", "empty_array"),
    ({"tools": [TOOL]}, "tools", ANY),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"functions": [{"name": "f"}]}, "functions", ANY),
    *(({"logit_bias": {key: 1}}, "logit_bias", "invalid_value") for key in (str(V), "x", "1.5", "-1", "", "٣", "9" * 5000)),
    ({"logit_bias": {"65": 101}}, "logit_bias", "decimal_above_max_value"),
    ({"logit_bias": {"65": 1e308}}, "logit_bias", "decimal_above_max_value"),
    ({"logit_bias": {"65": "x"}}, "logit_bias", "invalid_type"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "string_below_min_length"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", None),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs", ANY),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"a" * 65: 1}}, "chat_template_kwargs", "property_name_above_max_length"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {str(key): 1 for key in range(33)}}, "chat_template_kwargs", "object_above_max_properties"),
    ({"logit_bias": {str(key): "x" for key in range(10**5)}}, "logit_bias", "object_above_max_properties"),
    ({"tools": [TOOL] * 10**4}, "tools", "array_above_max_length"),
    ({"messages": HI * 20_000}, "messages", "array_above_max_length"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    ({"guided_json": {"type": "object"}}, "guided_json", "unsupported_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", ANY),
    ({"stream": "yes"}, "stream", "invalid_type"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_err_01_chat(stack: Stack, stream: bool) -> None:
    for fields, param, code in CHAT_FAULTS:
        response = await stack.chat(**{"stream": stream, **fields} if "stream_options" not in fields else fields)
        assert_error(response, 400, param, code)
    assert not stack.scheduler.submits


async def test_err_01_legacy(stack: Stack) -> None:
    faults: list[tuple[dict[str, Any], str | None, str | None]] = [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": 7}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt", "empty_array"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_type"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 129}, "prompt", "array_above_max_length"),
        ({"prompt": [["x"] * 10**5]}, "prompt", "invalid_type"),
        ({"prompt": ""}, "prompt", ANY),
        *(({"prompt": prompt}, "prompt", ANY) for prompt in ([-1], [V], [4294967296], [0, V], [[1], [V]], [2**70], [PADDING])),
        ({"prompt": [5] * 256}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 200, "max_tokens": 57}, "prompt", "context_length_exceeded"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"best_of": 1, "n": 2}, "best_of", ANY),
        ({"prompt": ["a"] * 65, "n": 2}, "n", ANY),
        ({"best_of": 2, "stream": True}, "best_of", ANY),
        ({"best_of": 21}, "best_of", "integer_above_max_value"),
        ({"suffix": "x"}, "suffix", ANY),
        ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
    ]
    for fields, param, code in faults:
        assert_error(await stack.complete(**fields), 400, param, code)
    assert not stack.scheduler.submits


async def test_api_06_unknown_model(stack: Stack) -> None:
    for stream in (False, True):
        assert_error(await stack.chat(model="nope", stream=stream), 404, None, "model_not_found")
    assert_error(await stack.complete(model="nope"), 404, None, "model_not_found")
    assert_error(await stack.http.get("/v1/models/nope"), 404, None, "model_not_found")


async def test_err_02_routes_and_methods(stack: Stack) -> None:
    for path in ("/v1/nope", "/v1/responses", "/v1/embeddings", "/v1/messages"):
        assert f"POST {path}" in assert_error(await stack.http.post(path, json={"model": "tiny"}), 404, None, None)["message"]
    assert_error(await stack.http.get("/nope"), 404, None, None)
    assert_error(await stack.http.post("/v1/chat/completions/", json={}), 404, None, None)
    for path in ("/health", "/v1/models", "/v1/models/org/tiny", "/version", "/tokenizer_info", "/openapi.json", "/"):
        whole, head = await stack.http.get(path), await stack.http.head(path)
        assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(whole.content)), b""), path
    assert (await stack.http.head("/v1/models/nope")).status_code == 404
    assert (await stack.http.head("/v1/chat/completions")).status_code == 405
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
    ):
        response = await stack.http.request(method, path)
        assert_error(response, 405, None, None)
        assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"x"', b"null", b"\xff{}", b"[" * 10**5, b'{"a":' * 10**5, b"\xef\xbb\xbf[]"),
        *(
            b'{"temperature": NaN}',
            b'{"temperature": Infinity}',
            b'{"a": "\\ud800"}',
            b'{"model": "tiny"} x',
            b'{"seed": ' + b"9" * 5000 + b"}",
        ),
    ],
)
async def test_err_03_bodies_that_are_no_json_objects(stack: Stack, body: bytes) -> None:
    response = await stack.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert_error(response, 400, None)


async def test_err_03_content_types(stack: Stack) -> None:
    stack.says("x")
    good = json.dumps({"model": "tiny", "messages": HI})
    marked = codecs.BOM_UTF8 + good.encode()
    assert (await stack.http.post("/v1/chat/completions", content=marked, headers={"content-type": "application/json"})).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert_error(await stack.http.post("/v1/chat/completions", content=good, headers={"content-type": kind}), 400, None)
    for encoding in ("gzip", "br, identity"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        error = assert_error(
            await stack.http.post("/v1/chat/completions", content=gzip.compress(good.encode()), headers=headers), 400, None
        )
        assert "encoding" in error["message"]
    for headers in ({"content-type": "Application/JSON; charset=utf-8"}, {"content-encoding": "identity"}, {}):
        assert (await stack.http.post("/v1/chat/completions", content=good, headers=headers)).status_code == 200
    twice = b'{"model": "nope", "model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
    assert (await stack.http.post("/v1/chat/completions", content=twice)).status_code == 200


async def test_smp_08_a_number_beyond_floats(stack: Stack) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e400}'
    assert_error(await stack.http.post("/v1/chat/completions", content=body), 400, "temperature", "decimal_above_max_value")


async def test_smp_08_a_number_beyond_floats_where_any_may_stand(stack: Stack) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": -1e400}}'
    assert_error(await stack.http.post("/v1/chat/completions", content=body), 400, None)


async def test_err_09_what_is_wrong_is_told_in_words_of_the_wire(stack: Stack) -> None:
    for body, param, wanted in (
        ({"messages": ["hi"]}, "messages[0]", "an object"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "a string or a list of parts"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]", "an object"),
        ({"stop": {}}, "stop", "a string or a list of strings"),
        ({"tool_choice": 3}, "tool_choice", "a string or an object"),
        ({"logit_bias": []}, "logit_bias", "an object"),
    ):
        assert f"Input should be {wanted}, got" in assert_error(await stack.chat(**body), 400, param, "invalid_type")["message"]


async def test_api_10_lone_surrogates(stack: Stack) -> None:
    stack.says("x")
    body = '{"model": "tiny", "stream": %s, "user": "%s", "stop": "%s", "messages": [{"role": "user", "content": "%s"}]}'
    for stream in ("true", "false"):
        for fault in ((r"\ud800", "a", "b"), ("a", r"\ud800", "b"), ("a", "b", r"a\ud800b"), ("a", "b", r"\udc00\ud800")):
            assert_error(await stack.http.post("/v1/chat/completions", content=body % (stream, *fault)), 400, None)
    tool = r'{"model": "tiny", "messages": [], "tools": [{"type": "function", "function": {"name": "\ud800"}}]}'
    assert_error(await stack.http.post("/v1/chat/completions", content=tool), 400, None)
    assert (await stack.http.post("/v1/chat/completions", content=body % ("false", "a", "b", r"\ud83d\ude00"))).status_code == 200


async def test_err_06_body_limit(start: Any) -> None:
    stack = await start(max_body_bytes=4096)
    stack.says("x")
    head = json.dumps({"model": "tiny", "messages": HI})
    assert (await stack.http.post("/v1/chat/completions", content=head.ljust(4096))).status_code == 200

    async def chunks(size: int) -> Any:
        for _ in range(size // 1024):
            yield b" " * 1024
        yield b" "

    assert_error(await stack.http.post("/v1/chat/completions", content=head.ljust(4097)), 413, None)
    assert_error(await stack.http.post("/v1/chat/completions", content=chunks(4096)), 413, None)
    assert_error(await stack.http.post("/v1/chat/completions", content=chunks(8 << 20)), 413, None)
    assert (await stack.chat()).status_code == 200


REJECTIONS = {
    RejectReason.REJECT_REASON_OVERLOADED: (429, None, "rate_limit_exceeded", "3"),
    RejectReason.REJECT_REASON_DEADLINE: (429, None, "rate_limit_exceeded", "3"),
    RejectReason.REJECT_REASON_TOO_LONG: (400, "messages", "context_length_exceeded", None),
    RejectReason.REJECT_REASON_INVALID: (400, "messages", None, None),
    RejectReason.REJECT_REASON_UNAVAILABLE: (503, None, None, "3"),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_str_07_rejections_are_http_errors(stack: Stack, stream: bool) -> None:
    for reason, (status, param, code, retry_after) in REJECTIONS.items():
        stack.plays(rejected=reason, retry_after_ms=2500)
        response = await stack.chat(stream=stream)
        assert_error(response, status, param, code)
        assert response.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("stream", [False, True])
async def test_err_09_an_inner_error_is_not_told(stack: Stack, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    stack.plays(reason=ERROR, detail="/srv/secret/path")
    response = await stack.chat(stream=stream)
    assert "secret" not in assert_error(response, 500, None, None)["message"]
    assert any(
        "/srv/secret/path" in record.getMessage() and response.headers["x-request-id"] in record.getMessage() for record in caplog.records
    )


async def test_an_error_in_a_stream_is_its_last_event(stack: Stack) -> None:
    stack.plays(stack.encode("hello"), reason=ERROR, detail="/srv/secret/path", step_s=0.01)
    raw = (await stack.chat(stream=True)).text
    *chunks, last, end = raw.split("\n\n")
    assert end == ""
    assert json.loads(last.removeprefix("data: "))["error"].keys() == {"message", "type", "param", "code"}
    assert "[DONE]" not in raw
    assert "secret" not in raw
    assert all(json.loads(chunk.removeprefix("data: "))["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_err_08_permanent_faults_are_sent_once(stack: Stack) -> None:
    """One of each kind of ERR-01, as the official client sends them: what it retries is a matter of the status and of one header."""
    calls: list[object] = []

    async def count(request: object) -> None:
        calls.append(request)

    async with openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]}) as http:
        client = openai.AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="none", http_client=http)
        faults = {code: fields for fields, _, code in CHAT_FAULTS if len(json.dumps(fields)) < 10_000}
        assert len(faults) > 15
        for fields in ({"model": "nope"}, *faults.values()):
            del calls[:]
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
                await client.post("/chat/completions", body={"model": "tiny", "messages": HI, **fields}, cast_to=object)
            assert (len(calls), bool(error.value.request_id)) == (1, True), fields
        for path, kind in (("/nope", openai.NotFoundError), ("/models", openai.APIStatusError)):
            del calls[:]
            with pytest.raises(kind) as error:
                await client.post(path, body={}, cast_to=object)
            assert (len(calls), error.value.status_code) == (1, 404 if path == "/nope" else 405)
    assert not stack.scheduler.submits


def test_messages_quote_little_of_the_input() -> None:
    for fields in ({"temperature": "x" * 10**5}, {"messages": {"a": "x" * 10**5}}, {"n": 10**4000}):
        with pytest.raises(InvalidRequest) as error:
            parse(ChatRequest, json.dumps({"model": "m", "messages": HI, **fields}).encode())
        assert len(str(error.value)) < 400


async def test_messages_quote_little_of_long_numbers(stack: Stack) -> None:
    long = 10**4000
    assert_error(await stack.chat(max_tokens=long), 400, "messages", "context_length_exceeded")
    assert_error(await stack.complete(max_tokens=long), 400, "prompt", "context_length_exceeded")
    assert_error(await stack.chat(min_tokens=long), 400, "min_tokens", "invalid_value")
    assert_error(await stack.complete(prompt=[long]), 400, "prompt", "invalid_value")


async def test_too_many_requests(start: Any) -> None:
    stack = await start(max_requests=1)
    release = asyncio.Event()
    stack.plays(release, stack.encode("x"), [2])
    first = asyncio.create_task(stack.chat())
    while not stack.scheduler.submits:
        await asyncio.sleep(0.01)
    response = await stack.chat()
    assert_error(response, 429, None, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "1"
    release.set()
    assert (await first).status_code == 200
    assert (await stack.chat()).status_code == 200


@pytest.mark.timed
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", '{"model":"tiny","prompt":[' + ",".join(["[1]"] * 1_200_000) + "]}"),
        ("/v1/completions", '{"model":"tiny","prompt":[' + ",".join(["1"] * 4_000_000) + "]}"),
        ("/v1/chat/completions", '{"model":"tiny","foo":[' + ",".join(["[]"] * 2_500_000) + '],"messages":[]}'),
        ("/v1/chat/completions", '{"model":"tiny","tools":[' + ",".join(['{"a":[[],[],[],[]]}'] * 400_000) + '],"messages":[]}'),
    ],
    ids=["lists of ids", "one list of ids", "an unknown key", "tools"],
)
async def test_sec_05_a_body_that_takes_long_to_parse_is_refused_unparsed(stack: Stack, path: str, body: str) -> None:
    """The client shares this event loop, so the time is that of both."""
    assert len(body) <= 8 << 20
    content = body.encode()
    begun = time.monotonic()
    assert_error(await stack.http.post(path, content=content), 400, None)
    assert time.monotonic() - begun < 1.0


async def test_a_body_that_does_not_come_is_cut_off_and_frees_its_place(start: Any) -> None:
    stack = await start(body_timeout_s=1.0, max_requests=2)
    stack.says("x")

    url = stack.http.base_url
    head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    connections = [await asyncio.open_connection(url.host, url.port) for _ in range(2)]
    for _, writer in connections:
        writer.write(head)
    async with asyncio.timeout(30):
        while (await stack.complete()).status_code != 429:
            await asyncio.sleep(0.01)
        for reader, writer in connections:
            assert b" 408 " in await reader.readline()
            writer.close()
        assert (await stack.complete()).status_code == 200


async def test_bodies_in_flight_are_bounded_together(start: Any) -> None:
    stack = await start(max_bodies_bytes=4096, body_timeout_s=5.0)
    stack.says("x")
    begun, release = asyncio.Event(), asyncio.Event()

    async def held() -> Any:
        yield b" " * 3000
        begun.set()
        await release.wait()
        yield json.dumps({"model": "tiny", "prompt": "hi"}).encode()

    first = asyncio.create_task(stack.http.post("/v1/completions", content=held()))
    await begun.wait()  # else it may be the one that is refused
    async with asyncio.timeout(30):
        while (response := await stack.complete(user="u" * 2000)).status_code == 200:
            await asyncio.sleep(0.01)
    assert_error(response, 429, None, "rate_limit_exceeded")
    release.set()
    assert (await first).status_code == 200
    assert (await stack.complete(user="u" * 2000)).status_code == 200


async def test_bodies_whose_prompts_wait_for_a_thread_count_too(start: Any, tmp_path: Path) -> None:
    slow = "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}{% endif %}x"
    tiny_tokenizer(tmp_path / "slow", slow)
    stack = await start({"folder": tmp_path / "slow", "fingerprint": "slow"}, max_bodies_bytes=4096)
    stack.says("x")
    assert (await stack.chat(user="u" * 3000)).status_code == 200

    def held() -> asyncio.Task[Any]:
        return asyncio.create_task(stack.chat(user="u" * 3000, messages=[{"role": "user", "content": "slow"}]))

    first = held()
    async with asyncio.timeout(30):
        while (response := await stack.complete(user="u" * 2000)).status_code == 200:
            if first.done():  # it came while one of the others was there: the next has a start, or that might go on for ever
                first = held()
                await asyncio.wait((first,), timeout=0.1)
    assert_error(response, 429, None, "rate_limit_exceeded")
    assert (await first).status_code in (200, 400)  # on a busy machine the template takes too long
    assert (await stack.complete(user="u" * 2000)).status_code == 200


async def test_a_response_format_is_refused_on_both_endpoints(stack: Stack) -> None:
    wanted = {"response_format": {"type": "json_object"}}
    assert_error(await stack.chat(**wanted), 400, "response_format", ANY)
    assert_error(await stack.complete(**wanted), 400, "response_format", ANY)
    assert (await stack.complete(response_format={"type": "text"})).status_code == 200


async def test_str_07_faults_known_before_the_first_token_are_http_errors(start: Any, tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ messages[0].content }}"
    tiny_tokenizer(tmp_path / "model", template)
    stack = await start({"folder": tmp_path / "model"})
    faults: list[tuple[dict[str, Any], int, str | None]] = [
        ({"model": "nope"}, 404, None),
        ({"max_tokens": 10**6}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages"),
        ({"n": 0}, 400, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    ]
    for fields, status, param in faults:
        response = await stack.chat(stream=True, **fields)
        assert_error(response, status, param)
        assert "data:" not in response.text


async def test_tpl_05_a_template_that_refuses_says_why_to_the_client(start: Any, tmp_path: Path) -> None:
    tiny_tokenizer(
        tmp_path / "model", "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}{{ messages.x.y }}"
    )
    stack = await start({"folder": tmp_path / "model"})
    for stream in (False, True):
        for role, words in (("system", "No system"), ("user", "")):
            error = assert_error(await stack.chat(stream=stream, messages=[{"role": role, "content": "x"}]), 400, "messages")
            assert words in error["message"]


async def test_tpl_06_without_a_template_only_completions_are_served(start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_tokenizer(tmp_path / "base", None)
    stack = await start({"folder": tmp_path / "base", "fingerprint": "base"})
    assert any("no chat template" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    stack.says("x")
    for stream in (False, True):
        assert "no chat template" in assert_error(await stack.chat(stream=stream), 400, "messages")["message"]
    assert (await stack.complete()).status_code == 200
