"""Prometheus beside a running stack: every expression has data under load, and alerts fire when what they are about is done to it.

The stack is two schedulers and two groups of the scripted engine. Windows and delays of the rules are twelve times shorter.
"""

import itertools
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually
from tests.system.chart.conftest import Helm
from tests.system.monitoring.conftest import (
    EVERYTHING,
    VARIABLES,
    Object,
    Prometheus,
    adapter_expressions,
    committed_dashboards,
    dashboards,
    faster,
    panel_expressions,
    rule_expressions,
    rules,
    scaling_expressions,
    selectors,
)
from tests.tiny import weightless_model

TIMES = 12
WITHIN_S = 120.0
CLIENTS = 4
SLOTS, MAX_WAITING = 4, 4
SCRIPT = {"step_s": 0.01, "default": {"ids": [40, 41, 42], "repeat": True}}
PROVOKED = {"LockstepOverload", "LockstepGroupStalled", "LockstepGroupDown", "LockstepNoLeader"}


class Load:
    """A context: inside it a few clients ask all the time, with prompts that begin alike; what they get does not matter."""

    def __init__(self, url: str) -> None:
        self._url, self._stop, self._number = url, threading.Event(), itertools.count()
        self._pool = ThreadPoolExecutor(CLIENTS)

    def __enter__(self) -> "Load":
        for _ in range(CLIENTS):
            self._pool.submit(self._ask_on)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def _ask_on(self) -> None:
        with httpx.Client(base_url=self._url, timeout=WITHIN_S) as client:
            while not self._stop.is_set():
                number = next(self._number)
                try:
                    ask(client, number, stream=number % 2 == 0)
                except httpx.TransportError:  # the stack is being hurt
                    self._stop.wait(0.1)


def ask(client: httpx.Client, number: int, *, stream: bool) -> int:
    prompt = "Once upon a time there was a small model that could say a few words. " * 2 + str(number)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "stream": stream}
    return client.post("/v1/completions", json=body).status_code


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = weightless_model(tmp_path_factory.mktemp("models") / "tiny")
    with Stack(
        tmp_path_factory.mktemp("stack"),
        model=model,
        workers=2,
        schedulers=2,
        engine="scripted",
        script=SCRIPT,
        worker_args=["--max-num-seqs", str(SLOTS), "--step-deadline-s", "600"],
        scheduler_args=["--max-waiting-requests", str(MAX_WAITING), "--served-model-name", "tiny"],
    ) as running:
        yield running


@pytest.fixture(scope="module")
def objects(helm: Helm) -> list[Object]:
    return helm.objects(EVERYTHING)


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, debian: Callable[..., None], promtool: str, stack: Stack, objects: list[Object]
) -> Iterator[Prometheus]:
    services = [stack.gateway, *stack.schedulers, *stack.workers]
    targets = [
        {"targets": [f"127.0.0.1:{service.ports['admin']}"], "labels": {"namespace": "models", "pod": f"{service.name}-{number}"}}
        for number, service in enumerate(services)
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "lockstep", "static_configs": targets}],
    }
    with Prometheus(tmp_path_factory.mktemp("prometheus"), config, faster(rules(objects), TIMES), promtool) as server:
        yield server


@pytest.fixture
def load(stack: Stack) -> Iterator[Load]:
    with Load(stack.url) as running:
        yield running


def has_data(prometheus: Prometheus, expr: str) -> bool:
    return any(math.isfinite(value) for _, value in prometheus.query(expr))


def total(prometheus: Prometheus, name: str, *matchers: str) -> float:
    """Of all series of a name."""
    return sum(value for _, value in prometheus.query(f"sum({name}{{{','.join(matchers)}}})"))


def test_every_service_is_scraped_and_a_request_is_seen_at_each(prometheus: Prometheus, stack: Stack) -> None:
    pods = {f"{name}-{number}" for number, name in enumerate(["gateway", "scheduler", "scheduler", "worker", "worker"])}
    eventually(lambda: prometheus.targets() == dict.fromkeys(pods, ""), WITHIN_S)
    stack.complete("hi", max_tokens=5)
    completions = ("lockstep_gateway_requests_total", 'code="200"', 'endpoint="/v1/completions"')
    eventually(lambda: total(prometheus, *completions) == 1, WITHIN_S)
    eventually(lambda: total(prometheus, "lockstep_request_success_total") == 1, WITHIN_S)
    eventually(lambda: total(prometheus, "lockstep_worker_plans_total") > 0, WITHIN_S)


def test_every_expression_has_data_under_load(prometheus: Prometheus, objects: list[Object], load: Load) -> None:
    pending = [*panel_expressions(dashboards(objects)), *scaling_expressions(objects), *adapter_expressions()]
    for place, expr in rule_expressions(rules(objects)):
        # An alert that is silent has no data itself: what it looks at must have.
        pending += [(place, selector.prettify()) for selector in selectors(expr)] if place.startswith("Lockstep") else [(place, place)]
    assert len(pending) > 130

    def all_have() -> bool:
        pending[:] = [(place, expr) for place, expr in pending if not has_data(prometheus, expr)]
        return not pending

    try:
        eventually(all_have, WITHIN_S)
    except AssertionError as error:
        raise AssertionError("\n".join(f"no data: {place}: {expr}" for place, expr in pending)) from error
    eventually(lambda: not prometheus.firing() & PROVOKED, WITHIN_S)  # on a busy machine one of them may have had its moment


def offered(prometheus: Prometheus, definition: str) -> set[str]:
    """What Grafana lists for a variable."""
    call = re.fullmatch(r"label_values\((.*), (\w+)\)", definition)
    assert call is not None
    selector, label = call.groups()
    for placeholder, value in VARIABLES.items():
        selector = selector.replace(placeholder, value)
    return {labels[label] for labels, _ in prometheus.query(f"group by ({label}) ({selector})")}


@pytest.mark.parametrize("name", committed_dashboards())
def test_variables_offer_what_there_is(prometheus: Prometheus, name: str) -> None:
    existing = {"namespace": {"models"}, "model_name": {"tiny"}, "engine": {"group-0", "group-1"}}
    definitions = {each["name"]: each["definition"] for each in committed_dashboards()[name]["templating"]["list"][1:]}
    eventually(lambda: {each: offered(prometheus, definitions[each]) for each in definitions} == existing, WITHIN_S)


def test_overload_fires(prometheus: Prometheus, stack: Stack) -> None:
    more = 4 * (2 * SLOTS + MAX_WAITING)
    with (
        httpx.Client(base_url=stack.url, timeout=WITHIN_S, limits=httpx.Limits(max_connections=more)) as client,
        ThreadPoolExecutor(more) as pool,
    ):

        def crowd() -> bool:
            codes = list(pool.map(lambda number: ask(client, number, stream=False), range(more)))
            assert set(codes) <= {200, 429}
            return "LockstepOverload" in prometheus.firing()

        eventually(crowd, WITHIN_S)


def test_a_stalled_group_fires(prometheus: Prometheus, stack: Stack, load: Load) -> None:
    eventually(lambda: stack.running()[0] > 0, WITHIN_S)
    ranks = stack.ranks()
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: "LockstepGroupStalled" in prometheus.firing(), WITHIN_S)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
    eventually(lambda: "LockstepGroupStalled" not in prometheus.firing(), WITHIN_S)


def test_a_lost_group_fires(prometheus: Prometheus, stack: Stack) -> None:
    eventually(lambda: "LockstepGroupDown" not in prometheus.firing(), WITHIN_S)
    stack.workers[1].kill()
    eventually(lambda: "LockstepGroupDown" in prometheus.firing(), WITHIN_S)
    stack.workers[1].start_again()
    eventually(lambda: "LockstepGroupDown" not in prometheus.firing(), WITHIN_S)


def test_no_leader_fires(prometheus: Prometheus, stack: Stack) -> None:
    eventually(lambda: "LockstepNoLeader" not in prometheus.firing(), WITHIN_S)
    for scheduler in stack.schedulers:
        scheduler.kill()
    eventually(lambda: "LockstepNoLeader" in prometheus.firing(), WITHIN_S)
    for scheduler in stack.schedulers:
        scheduler.start_again()
    eventually(lambda: "LockstepNoLeader" not in prometheus.firing(), WITHIN_S)
