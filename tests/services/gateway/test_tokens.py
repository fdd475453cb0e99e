"""What clients can ask about tokens."""

from typing import Any

from tests.services.gateway.conftest import Stack, assert_error

HI = [{"role": "user", "content": "hi <|im_end|>"}]


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    ids = stack.encode("hello, world")
    for fields in ({}, {"model": "org/tiny", "messages": None}, {"add_special_tokens": False}):
        answer = (await stack.http.post("/tokenize", json={"prompt": "hello, world", **fields})).json()
        assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    named = (await stack.http.post("/tokenize", json={"prompt": "hello, world", "return_token_strs": True})).json()
    assert "".join(named["token_strs"]) == "hello, world"
    assert (await stack.http.post("/detokenize", json={"tokens": [1, *ids, 2]})).json() == {"prompt": "<|im_start|>hello, world<|im_end|>"}
    assert (await stack.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_conversation_is_tokenized_and_rendered_as_it_is_answered(stack: Stack) -> None:
    stack.says("x")
    await stack.chat(messages=HI)
    ids = stack.scheduler.prompts[0]
    assert (await stack.http.post("/tokenize", json={"messages": HI})).json()["tokens"] == ids
    rendered = (await stack.http.post("/v1/chat/completions/render", json={"model": "tiny", "messages": HI})).json()
    text = "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert rendered == {"model": "tiny", "prompt": text, "tokens": ids, "count": len(ids)}
    continued = {"messages": [*HI, {"role": "assistant", "content": "well, "}], "continue_final_message": True}
    assert (await stack.http.post("/v1/chat/completions/render", json={"model": "tiny", **continued})).json()["prompt"].endswith("well, ")
    assert len(stack.scheduler.submits) == 1


async def test_tokenizer_info(stack: Stack) -> None:
    info = (await stack.http.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["bos_token"], info["eos_token_ids"], info["vocab_size"]) == ("<|im_end|>", "<|endoftext|>", [2], 384)
    assert "im_start" in info["chat_template"]


async def test_faults(stack: Stack) -> None:
    faults: list[tuple[str, dict[str, Any], str | None]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a" * 10**5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [384]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/v1/chat/completions/render", {"model": "tiny"}, "messages"),
    ]
    for path, body, param in faults:
        assert_error(await stack.http.post(path, json=body), 400, param)
    assert_error(await stack.http.post("/tokenize", json={"model": "nope", "prompt": "a"}), 404, None, "model_not_found")


async def test_large_answers_come_in_pieces(start: Any) -> None:
    stack: Stack = await start({"max_length": 1 << 20})
    text = "once upon a 😀 " * 3000
    tokenized = await stack.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    ids = tokenized.json()["tokens"]
    assert (ids, len(ids)) == (stack.encode(text), tokenized.json()["count"])
    assert len(tokenized.json()["token_strs"]) == len(ids) > 10_000
    detokenized = await stack.http.post("/detokenize", json={"tokens": ids})
    assert detokenized.json() == {"prompt": text}
    assert not [answer.url for answer in (tokenized, detokenized) if "content-length" in answer.headers]
