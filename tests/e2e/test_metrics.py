"""Metrics of the three services over one run: gauges rest, each request counts once, labels are bounded, probes answer under load."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.stack import Service, Stack
from tests.exposition import OPENMETRICS, samples
from tests.processes import Family, eventually

StartStack = Callable[..., Stack]

STOPS, ENDLESS, BROKEN = 1, 2, 3  # seeds
SCRIPT = {
    "step_s": 0.002,
    "default": {"ids": [40, 41, 42, 43], "repeat": True},  # F G H I
    "by_seed": {STOPS: {"ids": [40, 41]}, BROKEN: {"ids": [40, -2]}},  # -2: the row's logits are not finite
}
ASKED = 500  # times, with names that are new each time
REASONS = ("stop", "length", "abort", "error")
PROBE_S = 1.0


def scrape(service: Service, accept: str = "text/plain") -> dict[str, float]:
    return samples(
        httpx.get(f"http://127.0.0.1:{service.ports['admin']}/metrics", headers={"Accept": accept}, trust_env=False, verify=False)
    )


def total(values: dict[str, float], name: str, *labels: str) -> float:
    """Of all series of a name that have these labels, each `label=value`; of which there is one at least."""
    found = [value for key, value in values.items() if key.split("{")[0] == name and all(label in key for label in labels)]
    assert found, f"there is no series {name} with {labels}"
    return sum(found)


def finished(stack: Stack) -> dict[str, float]:
    values = scrape(stack.scheduler)
    return {reason: total(values, "lockstep_request_success_total", f"finished_reason={reason}") for reason in REASONS}


RUNNING = tuple(f"{prefix}num_requests_running" for prefix in ("lockstep_", "vllm:"))
BUSY = (*RUNNING, "lockstep_kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "lockstep_scheduler_outstanding_plans")
WAITING = ("lockstep_num_requests_waiting", "vllm:num_requests_waiting", "lockstep_num_tokens_waiting")


def gauges(stack: Stack) -> dict[str, float]:
    """What counts requests, pages or plans that are there; nothing of all services is ever negative."""
    scheduler, gateway, worker = scrape(stack.scheduler), scrape(stack.gateway), scrape(stack.worker)
    assert all(value >= 0 for values in (scheduler, gateway, worker) for value in values.values())
    return {
        **{name: total(scheduler, name) for name in (*BUSY, *WAITING)},
        "owned": total(scheduler, "lockstep_scheduler_pages", "state=owned"),
        "inflight": total(gateway, "lockstep_gateway_inflight_requests"),
        "queued": total(worker, "lockstep_worker_queued_plans"),
    }


def at_rest(stack: Stack) -> bool:
    return not any(gauges(stack).values())


def is_busy(stack: Stack) -> bool:
    seen = gauges(stack)
    return all(seen[name] for name in (*BUSY, *WAITING, "owned", "inflight"))


def leave(stack: Stack, count: int) -> None:
    """So many clients leave in the middle of their streams."""
    for _ in range(count):
        with stack.stream("hi", max_tokens=200, seed=ENDLESS) as stream:
            next(stream)


@pytest.fixture
def scripted(start_stack: StartStack, weightless_model: Path) -> Callable[..., Stack]:
    def start(**options: object) -> Stack:
        return start_stack(model=weightless_model, engine="scripted", **{"script": SCRIPT, **options})

    return start


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, weightless_model: Path) -> Iterator[Stack]:
    """For several tests, of which the first counts from 0."""
    folder, names = tmp_path_factory.mktemp("stack"), ["--served-model-name", "tiny"]
    script = {**SCRIPT, "step_s": 0.01}  # who leaves has two seconds for it
    with Stack(folder, model=weightless_model, engine="scripted", script=script, scheduler_args=names) as stack:
        yield stack


def test_met_01_gauges_return_to_rest(scripted: Callable[..., Stack]) -> None:
    stack = scripted(
        script={**SCRIPT, "step_s": 0.02},
        worker_args=["--max-num-seqs", "2"],
        scheduler_args=["--max-waiting-requests", "2"],
        gateway_args=["--timeout-s", "3"],
    )
    assert at_rest(stack)
    stack.complete("hi", max_tokens=5, seed=STOPS)
    eventually(lambda: at_rest(stack))
    leave(stack, 3)
    eventually(lambda: at_rest(stack))
    with pytest.raises(openai.InternalServerError):
        stack.complete("hi", max_tokens=5, seed=BROKEN)
    eventually(lambda: at_rest(stack))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        crowding = thread.submit(crowd, stack, 30)  # of which most are rejected, and those that are not run out of time
        eventually(lambda: is_busy(stack))
        crowding.result()
    eventually(lambda: at_rest(stack))
    rejected = scrape(stack.scheduler)
    assert (
        sum(total(rejected, "lockstep_scheduler_requests_rejected_total", f"reason={reason}") for reason in ("overloaded", "deadline")) > 0
    )
    assert total(scrape(stack.gateway), "lockstep_gateway_requests_total", "code=504") > 0


def crowd(stack: Stack, count: int) -> None:
    """So many clients at once, none of which is let finish."""
    refused = (openai.RateLimitError, openai.InternalServerError, openai.APIConnectionError)

    def ask(_: int) -> None:
        with contextlib.suppress(*refused):
            stack.complete("hi", max_tokens=240, extra_body={"ignore_eos": True}, seed=ENDLESS)

    stack.openai  # noqa: B018  made once, before the threads share it
    with concurrent.futures.ThreadPoolExecutor(count) as clients:
        list(clients.map(ask, range(count)))


def test_met_02_every_request_is_counted_once_by_outcome(shared: Stack) -> None:
    stack = shared
    for _ in range(4):
        stack.complete("hi", max_tokens=50, seed=STOPS)
    stack.complete("hi", max_tokens=50, stop="H", seed=ENDLESS)
    for _ in range(4):
        stack.chat("hi", max_tokens=7, seed=ENDLESS)
    leave(stack, 3)
    for body in ({"max_tokens": -1}, {"temperature": 9}):
        with pytest.raises(openai.BadRequestError):
            stack.complete("hi", **body)
    with pytest.raises(openai.InternalServerError):
        stack.complete("hi", max_tokens=50, seed=BROKEN)
    eventually(lambda: at_rest(stack))
    assert finished(stack) == {"stop": 5, "length": 4, "abort": 3, "error": 1}
    gateway = scrape(stack.gateway)
    answers = {code: total(gateway, "lockstep_gateway_requests_total", "endpoint=/v1/c", f"code={code}") for code in (200, 400, 499, 500)}
    assert answers == {200: 9, 400: 2, 499: 3, 500: 1}
    assert total(gateway, "lockstep_gateway_requests_total", "endpoint=/v1/c") == sum(answers.values()) == 15
    assert total(gateway, "lockstep_gateway_request_duration_seconds_count", "endpoint=/v1/c") == 15
    assert total(gateway, "lockstep_gateway_disconnects_total") == 3
    assert total(scrape(stack.scheduler), "vllm:request_success_total", "model_name=tiny", "engine=group-0") == 13
    two = stack.client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "n": 2, "max_tokens": 7, "seed": ENDLESS}).json()
    assert [choice["finish_reason"] for choice in two["choices"]] == ["length", "length"]
    eventually(lambda: at_rest(stack))
    gateway = scrape(stack.gateway)
    assert total(gateway, "lockstep_gateway_requests_total", "endpoint=/v1/c") == 16  # what a client asks for is one
    assert total(gateway, "lockstep_gateway_request_duration_seconds_count", "endpoint=/v1/c") == 16
    assert sum(finished(stack).values()) == 13 + 2  # what is scheduled are choices


def test_met_05_clients_cannot_make_series(shared: Stack) -> None:
    stack = shared
    chosen = random.Random(5)

    def word() -> str:
        return "".join(chosen.choices(string.ascii_uppercase, k=8))

    stack.chat("hi", max_tokens=2, user="somebody")
    for path in ("/nowhere", "/health", "/v1/models"):
        stack.client.get(path)
    before = [scrape(service) for service in (stack.gateway, stack.scheduler, stack.worker)]
    words = [word() for _ in range(4 * ASKED)]
    for number in range(ASKED):
        name, path, user, method = words[number::ASKED]
        body = {"model": name, "messages": [{"role": "user", "content": path}], "max_tokens": 1}
        assert stack.client.post("/v1/chat/completions", json=body).status_code == 404
        stack.client.get(f"/{path}")
        stack.client.request(method, "/v1/completions")
        stack.client.post("/v1/chat/completions", json={**body, "model": "tiny", "user": user}, headers={"Authorization": f"Bearer {user}"})
    after = [scrape(service) for service in (stack.gateway, stack.scheduler, stack.worker)]
    for old, new in zip(before, after, strict=True):
        assert len(new) - len(old) < 20
        assert not any(each in key for key in new for each in words)


PATHS = ("/metrics", "/livez")


@pytest.mark.timed
def test_met_06_k8s_03_probes_answer_and_streams_flow_under_load(scripted: Callable[..., Stack]) -> None:
    stack = scripted(scheduler_args=["--max-waiting-requests", "20"])
    urls = [f"{stack.url}/health"]
    urls += [
        f"http://127.0.0.1:{service.ports['admin']}{path}" for service in (stack.gateway, stack.scheduler, stack.worker) for path in PATHS
    ]
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(len(urls) + 2) as threads:
        try:
            probing = [threads.submit(probe, url, over) for url in urls]
            flowing = threads.submit(longest_gap_s, stack, over)
            prompts = [" " * (2 << 20), "word " * (400 << 10), *["hi"] * 200]
            statuses = threads.submit(asyncio.run, post_all(stack.url, prompts)).result()
        finally:
            over.set()
        assert statuses <= {200, 400, 429}
        slowest = {url: each.result() for url, each in zip(urls, probing, strict=True)}
        assert max(slowest.values()) < PROBE_S, slowest
        assert flowing.result() < PROBE_S


async def post_all(url: str, prompts: list[str]) -> set[int]:
    """The statuses of completions that are asked for all at once; on one thread, so as not to hold up the probes here."""
    async with httpx.AsyncClient(base_url=url, timeout=100, limits=httpx.Limits(), trust_env=False, verify=False) as client:
        bodies = [{"model": "tiny", "prompt": prompt, "max_tokens": 20, "seed": ENDLESS} for prompt in prompts]
        return {answer.status_code for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))}


def probe(url: str, over: threading.Event) -> float:
    """The longest that it took, over and over until all is over; every answer is 200."""
    slowest = 0.0
    with httpx.Client(timeout=30, trust_env=False, verify=False) as client:
        while not over.is_set():
            answer = client.get(url)
            assert answer.status_code == 200, (url, answer.text)
            slowest = max(slowest, answer.elapsed.total_seconds())
            over.wait(0.05)
    return slowest


def longest_gap_s(stack: Stack, over: threading.Event) -> float:
    """The longest silence within streams that run all the while, one after the other."""
    longest = 0.0
    while not over.wait(0.05):
        try:
            with stack.stream("hi", max_tokens=200, seed=ENDLESS) as stream:
                times = [time.monotonic() for _ in stream]
        except openai.RateLimitError:  # the queue is full, as it should be
            continue
        longest = max(longest, *(after - before for before, after in itertools.pairwise(times)))
    return longest


NAME = "org/tiny:1"


def test_met_07_the_parsers_agree_and_tokens_are_those_of_usage(scripted: Callable[..., Stack]) -> None:
    stack = scripted(served_model_names=[NAME], scheduler_args=["--served-model-name", NAME])
    usages = []
    long = "a prompt that is longer than a page of the cache, " * 2
    for prompt, options in (("hi", {"seed": STOPS}), (long, {"seed": ENDLESS}), (long, {"stream": True, "seed": ENDLESS})):
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": 9,
            "stream_options": {"include_usage": True} if "stream" in options else None,
        }
        answer = stack.client.post("/v1/completions", json={**body, **options})
        last = answer.text.split("\n\n")[-3].removeprefix("data: ") if "stream" in options else answer.text
        usages.append(json.loads(last)["usage"])
    eventually(lambda: at_rest(stack))
    expected = {
        "prompt": sum(usage["prompt_tokens"] for usage in usages),
        "completion": sum(usage["completion_tokens"] for usage in usages),
        "cached": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
    }
    gateway, scheduler = scrape(stack.gateway), scrape(stack.scheduler)
    assert {kind: total(gateway, "lockstep_gateway_tokens_total", f"model_name={NAME}", f"type={kind}") for kind in expected} == expected
    for prefix in ("lockstep_", "vllm:"):
        assert total(scheduler, f"{prefix}prompt_tokens_total", f"model_name={NAME}") == expected["prompt"]
        assert total(scheduler, f"{prefix}generation_tokens_total", f"model_name={NAME}") == expected["completion"]
        assert total(scheduler, f"{prefix}time_to_first_token_seconds_count") == 3
        assert total(scheduler, f"{prefix}prefix_cache_hits_total", f"model_name={NAME}") == expected["cached"] > 0
    for service in (stack.gateway, stack.scheduler, stack.worker):
        assert ours(scrape(service)) == ours(scrape(service, OPENMETRICS))


def ours(values: dict[str, float]) -> set[str]:
    return {key for key in values if key.startswith(("lockstep_", "vllm:"))}


def test_mod_06_alive_but_not_ready_while_the_model_loads(tmp_path: Path, weightless_model: Path) -> None:
    family = Family()
    script = tmp_path / "script.json"
    script.write_text('{"load_s": 3600}')
    with contextlib.ExitStack() as started:

        def start(name: str, *arguments: str) -> Service:
            service = Service(name, tmp_path, family, arguments)
            started.callback(service.release_ports)
            started.callback(service.process.wait, 10)
            started.callback(service.terminate)
            return service

        worker = start("worker", "--model", str(weightless_model), "--engine", "scripted", "--script", str(script))
        scheduler = start("scheduler", "--worker", worker.address)
        gateway = start("gateway", "--scheduler", scheduler.address, "--served-model-name", "tiny")
        for service in (worker, scheduler, gateway):
            url = f"http://127.0.0.1:{service.ports['admin']}"
            statuses = [httpx.get(url + path, trust_env=False, verify=False).status_code for path in ("/livez", "/readyz", "/metrics")]
            assert statuses == [200, 503, 200], service.name
        body = {"model": "tiny", "prompt": "hi"}
        answer = httpx.post(f"http://{gateway.address}/v1/completions", json=body, trust_env=False, verify=False)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert int(answer.headers["Retry-After"]) >= 1


def test_sec_08_logs_follow_a_request_and_tell_nothing_of_it(shared: Stack) -> None:
    stack = shared
    body = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 12, "seed": ENDLESS, "user": "mallory\nforged [error] line"}
    headers = {"Authorization": "Bearer sk-secret", "x-request-id": "follow-me"}
    text = stack.client.post("/v1/completions", json=body, headers=headers).json()["choices"][0]["text"]
    stack.client.post("/v1/completions", json={**body, "model": "no\nforged [error] line"}, headers=headers)
    stack.client.get("/no%0Aforged%20[error]%20line")
    eventually(lambda: "follow-me" in stack.scheduler.log)
    (line,) = [line for line in stack.scheduler.log.splitlines() if "follow-me" in line]
    assert "a request has ended" in line
    assert all(part in line for part in ("end=length", "completion_tokens=12", "prompt_tokens=", "queue_s=", "ttft_s=", "total_s="))

    def told() -> list[str]:
        return [line for line in stack.gateway.log.splitlines() if "request_id=follow-me" in line]

    eventually(lambda: len(told()) == 2)  # a line is written when its request has been answered
    lines = told()
    assert "/v1/completions -> 200" in lines[0]
    assert "12 tokens of tiny" in lines[0]
    for service in (stack.gateway, stack.scheduler, stack.worker):
        assert not any(told in service.log for told in ("secret", text, "mallory"))
        assert not any(line.startswith("forged") for line in service.log.splitlines())
