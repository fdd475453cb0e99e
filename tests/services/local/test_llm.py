"""The offline API: the same tokens as the engine's, any number of prompts, and an end that leaves nobody behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.driver import Driver, spec
from services.local import LLM, InvalidPrompt, RequestFailed, Sampling
from services.local.backend import ServiceEnded, _devices
from shared import rpc
from shared.errors import ConfigError, LockstepError
from shared.protocol.plan import SlotFlag
from tests import tiny
from tests.processes import Family, eventually

ROOT = Path(__file__).resolve().parents[3]
SLOTS = 8
SLOW_STEP_S = 0.05


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, threads=1, max_num_seqs=SLOTS, progress=False) as started:
        yield started


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """A file for the scripted engine, which goes on for ever unless told otherwise."""

    def write(**content: object) -> Path:
        (tmp_path / "script.json").write_text(json.dumps({"default": {"ids": [40, 41], "repeat": True}, **content}))
        return tmp_path / "script.json"

    return write


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_greedy_tokens_are_the_engines_own(llm: LLM, tiny_model: Path) -> None:
    from services.worker.engine.engine import TorchEngine

    prompts = [[5, 6, 7], [9] * 30, [11, 12]]
    driver = Driver(TorchEngine(spec(tiny_model), lambda phase, part: None), page_size=4, pages_per_slot=16)
    expected = []
    for slot, prompt in enumerate(prompts):
        first = driver.prefill(slot, prompt, flags=SlotFlag.IGNORE_EOS)
        expected.append([first, *(token for (token,) in driver.decode(slot, iterations=8))])
    completions = llm.generate(prompts, Sampling(temperature=0, max_tokens=9, ignore_eos=True))
    assert [each.ids.tolist() for each in completions] == expected
    assert [(each.text, each.finish_reason) for each in completions] == [(None, "length")] * 3


def test_texts_go_through_the_models_tokenizer(llm: LLM) -> None:
    text, ids = "Once upon a time", llm.tokenizer.encode("Once upon a time")
    by_text, by_ids = llm.generate([text, ids], Sampling(temperature=0, max_tokens=12))
    assert by_text.prompt_ids.tolist() == by_ids.prompt_ids.tolist() == ids
    assert by_text.ids.tolist() == by_ids.ids.tolist()
    assert by_text.text == llm.tokenizer.decode(by_text.ids.tolist(), skip_special_tokens=True)


def test_a_rendered_chat_is_a_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt: list[int] = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # type: ignore[assignment]
    (completion,) = llm.generate([prompt], Sampling(max_tokens=3, ignore_eos=True))
    assert completion.prompt_ids.tolist() == prompt
    assert len(completion.ids) == 3


def test_each_prompt_has_its_own_sampling(llm: LLM) -> None:
    one = Sampling(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    unbounded = replace(one, top_k=-1)  # as in a request
    same, again, other, short = llm.generate([[5, 6]] * 4, [one, unbounded, replace(one, seed=8), Sampling(1, temperature=0)])
    assert same.ids.tolist() == again.ids.tolist() != other.ids.tolist()
    assert len(short.ids) == 1


def test_logprobs_of_the_prompt_are_those_of_the_completion(llm: LLM) -> None:
    (said,) = llm.generate([[5, 6, 7]], Sampling(8, temperature=0, ignore_eos=True, logprobs=3))
    assert said.logprobs is not None
    assert said.prompt_logprobs is None
    assert said.logprobs.top_ids.shape == said.logprobs.top_values.shape == (8, 3)
    assert said.logprobs.top_ids[:, 0].tolist() == said.ids.tolist()
    (scored,) = llm.generate([[5, 6, 7, *said.ids]], Sampling(0, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs.values) == 10
    np.testing.assert_allclose(scored.prompt_logprobs.values[2:], said.logprobs.values, atol=1e-4)


def test_penalties_and_biases_change_what_is_said(llm: LLM) -> None:
    greedy = Sampling(12, temperature=0, ignore_eos=True)
    once, biased = llm.generate([[5, 6]] * 2, [replace(greedy, repetition_penalty=2.0), replace(greedy, logit_bias={9: 100.0})])
    assert len({5, 6, *once.ids.tolist()}) == 14  # nothing twice
    assert biased.ids.tolist() == [9] * 12


def test_far_more_prompts_than_slots_are_all_answered_in_order(llm: LLM) -> None:
    prompts = [[3 + number % 300, 3 + number // 300] for number in range(40 * SLOTS)]
    wanted = [Sampling(max_tokens=1 + number % 3, temperature=0, ignore_eos=True) for number in range(len(prompts))]
    completions = llm.generate(prompts, wanted)
    assert [each.prompt_ids.tolist() for each in completions] == prompts
    assert [len(each.ids) for each in completions] == [each.max_tokens for each in wanted]
    alone = llm.generate(prompts[-1:], wanted[-1])[0]
    assert alone.ids.tolist() == completions[-1].ids.tolist()


def test_more_prompts_at_a_time_than_a_peer_may_leave_unread_are_all_answered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_UNSENT_MESSAGES", SLOTS)  # half of what is asked at once
    completions = llm.generate([[3 + number] for number in range(4 * SLOTS)], Sampling(max_tokens=1))
    assert [len(each.ids) for each in completions] == [1] * 4 * SLOTS


def test_threads_take_turns(llm: LLM) -> None:
    got: dict[int, list[int]] = {}

    def ask(tokens: int) -> None:
        got[tokens] = [len(each.ids) for each in llm.generate([[5]] * 3, Sampling(tokens, ignore_eos=True))]

    threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {tokens: [tokens] * 3 for tokens in range(1, 5)}


@pytest.mark.parametrize(
    "prompts, told",
    [
        ("hello", "write [text]"),
        ([[]], "prompt 0: a text or a list of at least one token id, got []"),
        ([[5], [1.5]], "prompt 1: a text or a list"),
        ([[5], [[6]]], "prompt 1: a text or a list"),
        ([[5], [[6], [7, 8]]], "prompt 1: a text or a list"),
        ([None], "prompt 0: a text or a list"),
        ([[5, tiny.VOCAB_SIZE]], f"the vocabulary has {tiny.VOCAB_SIZE}"),
        ([[-1]], "ids from -1 to -1"),
        ([[2**70]], "prompt 0: a text or a list"),
        (["half a \ud800"], "prompt 0: half of a surrogate pair at character 7 of the text"),
        ([""], "prompt 0: a text or a list"),  # no BOS either
        ([[5] * tiny.MAX_LENGTH], f"exceed the {tiny.MAX_LENGTH} that fit"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_before_anything_is_computed(llm: LLM, prompts: list[list[int]], told: str) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        llm.generate(prompts, Sampling(max_tokens=1))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(-1),
        Sampling(None),  # type: ignore[arg-type]
        Sampling("5"),  # type: ignore[arg-type]
        Sampling(1, temperature=None),  # type: ignore[arg-type]
        Sampling(1, top_k=2**40),
        Sampling(1, stop_token_ids=(2**40,)),
        Sampling(1, seed="x"),  # type: ignore[arg-type]
        {"max_tokens": 1},
    ],
)
def test_a_sampling_of_the_wrong_kind_is_refused_likewise(llm: LLM, sampling: Sampling) -> None:
    with pytest.raises(InvalidPrompt, match="prompt 0: its sampling has a value of the wrong kind or size"):
        llm.generate([[5]], [sampling])


def test_no_prompts_are_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []
    with pytest.raises(InvalidPrompt, match="got 2 for 1 prompts"):
        llm.generate([[5]], [Sampling(), Sampling()])


def test_a_refused_request_names_its_prompt_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="prompt 1: temperature must be"):
        llm.generate([[5], [6]], [Sampling(max_tokens=200, ignore_eos=True), Sampling(max_tokens=1, temperature=-1)])
    assert len(llm.generate([[5]], Sampling(2, ignore_eos=True))[0].ids) == 2


def test_a_folder_of_a_config_alone_computes_with_random_weights_and_logs_stay_where_they_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    logs = tmp_path / "of" / "this run"
    with LLM(tmp_path, load_format="random", threads=1, progress=False, logs=logs) as llm:
        (completion,) = llm.generate([[5, 6]], Sampling(4, ignore_eos=True))
        assert len(completion.ids) == 4
        with pytest.raises(ConfigError, match="give prompts as token ids"):
            llm.generate(["hello"])
    assert "the weights are random" in (logs / "worker.log").read_text()
    assert (logs / "scheduler.log").is_file()


def test_several_groups_share_the_prompts(model: Path, script: Callable[..., Path]) -> None:
    before = children()
    with LLM(model, groups=2, engine="scripted", script=script(step_s=0.005), max_num_seqs=2, progress=False) as llm:
        assert llm.slots == 4
        assert llm.admin_ports.keys() == {"scheduler", "worker-0", "worker-1"}
        completions = llm.generate([[5, number] for number in range(20)], Sampling(4))
        assert [each.ids.tolist() for each in completions] == [[40, 41, 40, 41]] * 20
        closing = threading.Timer(0.3, llm.close)
        closing.start()
        with pytest.raises(ServiceEnded, match="closed"):
            llm.generate([[5]] * 1000, Sampling(200))
        closing.join()
        assert children() <= before
        with pytest.raises(ServiceEnded, match="was closed"):
            llm.generate([[5]])
    llm.close()


def test_a_killed_worker_ends_the_call_and_says_which(model: Path, script: Callable[..., Path]) -> None:
    before = children()
    with LLM(model, engine="scripted", script=script(step_s=SLOW_STEP_S), progress=False) as llm:
        (worker,) = [each for each in children() - before if "services.worker" in each.cmdline()]
        threading.Timer(0.5, worker.kill).start()
        with pytest.raises(ServiceEnded, match=r"the worker was killed by SIGKILL.*its log is in ") as caught:
            llm.generate([[5]], Sampling(200))
        with pytest.raises(ServiceEnded, match="the worker was killed by SIGKILL"):
            llm.generate([[5]], Sampling(1))
    logs = Path(str(caught.value).rsplit(" ", 1)[1])
    assert (logs / "worker.log").is_file()
    shutil.rmtree(logs)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"max_model_len": 10**6}, "is more than the model's"),
        ({"no_such_setting": 1}, "--no-such-setting"),
        ({"groups": 0}, "groups: at least 1"),
    ],
)
def test_a_setting_that_does_not_fit_is_told_at_start(tiny_model: Path, settings: dict[str, Any], told: str) -> None:
    before = children()
    with pytest.raises(ConfigError) as caught:
        LLM(tiny_model, progress=False, **settings)
    assert told in str(caught.value)
    assert children() <= before


def test_a_folder_that_is_none_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        LLM(tmp_path / "nothing", progress=False)


def test_the_examples_of_the_documentation_run(model: Path, script: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "docs/offline.md").read_text(), re.DOTALL)
    settings = f'"{model}", engine="scripted", script="{script()}", progress=False'
    inside = first.replace('"models/Qwen3-0.6B"', settings) + textwrap.indent(second, " " * 4)
    exec(inside, names := dict[str, Any]())
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()] == [["length", "32"]] * 2
    assert all(isinstance(each, int) for each in names["prompt"])


ASK_TWICE = """
import os
import signal
import sys
from services.local import LLM, Sampling
from services.local.backend import ServiceEnded

signal.signal(signal.SIGINT, signal.default_int_handler)  # which Python leaves out where a shell in the background has it ignored
llm = LLM(sys.argv[1], engine="scripted", script=sys.argv[2])
try:
    print("ready", flush=True)
    llm.generate([[5]] * 100, Sampling(200))
except KeyboardInterrupt:
    child = os.fork()
    if not child:
        try:
            llm.generate([[5]], Sampling(2))
        except ServiceEnded:
            sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(len(llm.generate([[5]], Sampling(2))[0].ids), flush=True)
"""


def test_ctrl_c_gives_up_the_call_a_fork_has_no_llm_and_one_that_nobody_closes_ends_with_python(
    model: Path, script: Callable[..., Path], tmp_path: Path
) -> None:
    family = Family()
    command = [sys.executable, "-c", ASK_TWICE, str(model), str(script(step_s=SLOW_STEP_S))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=family.environment) as process:
        assert process.stdout is not None  # it is a pipe
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (output, process.returncode) == ("3\n2\n", 0), errors
    assert errors.splitlines()[0] == "starting the worker"
    family.end()


def test_a_killed_client_leaves_nobody(model: Path, script: Callable[..., Path], tmp_path: Path) -> None:
    family = Family()
    command, environment = [sys.executable, "-c", ASK_TWICE, str(model), str(script())], {**family.environment, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        assert process.stdout is not None  # it is a pipe
        process.stdout.readline()
        process.kill()
    eventually(lambda: not family.living())


def test_groups_share_no_gpu() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,GPU-9"}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in _devices(2, 2, visible)] == ["4,5", "6,7"]
    assert _devices(1, 2, visible) == [{}]
    assert _devices(3, 2, {"CUDA_VISIBLE_DEVICES": ""}) == [{}] * 3
    with pytest.raises(LockstepError, match="need 6 GPUs, there are 5"):
        _devices(3, 2, visible)
