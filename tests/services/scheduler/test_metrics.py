"""The engine's series: there from the start, counted once, at rest when a group is gone, and the same under both names."""

from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from services.scheduler.gauges import EngineState
from services.scheduler.group import Group
from services.scheduler.metrics import FINISHED_REASONS, MAX_ENGINES, TOKEN_MODES, SchedulerMetrics
from services.scheduler.model import Model
from services.scheduler.requests import Key, RequestTimes
from services.scheduler.scheduler import Scheduler
from shared.metrics import new_registry
from shared.protocol.generation_pb2 import FINISH_REASON_STOP, REJECT_REASON_OVERLOADED
from shared.protocol.plan import Limits, Plan
from tests.services.scheduler import session_client
from tests.services.scheduler.device import EOS, Device

BUSY = EngineState(
    ready=True,
    running=3,
    waiting=2,
    waiting_tokens=700,
    kv_usage=0.25,
    pages={"ready": 75, "owned": 25, "cooling": 0},
    page_size=16,
    num_pages=100,
    outstanding_plans=2,
    lead_s=0.004,
    lead_target_s=0.003,
)


def busy() -> EngineState:
    return BUSY


class Metrics(SchedulerMetrics):
    def __init__(self, model_name: str = "tiny", vllm_names: bool = True) -> None:
        self.registry = new_registry("scheduler")
        super().__init__(model_name, vllm_names, self.registry)

    def value(self, name: str, engine: str = "blue", **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "tiny", "engine": engine, **labels})

    def cut_off_by(self, component: str) -> float | None:
        labels = {"model_name": "tiny", "component": component}
        return self.registry.get_sample_value("lockstep_scheduler_requests_cut_off_total", labels)


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not family.name.startswith("process_")
    }


def test_every_series_is_there_at_0_before_any_group() -> None:
    metrics = Metrics()
    values = {name: value for (name, _), value in samples(metrics.registry).items() if name != "lockstep_build_info"}
    assert set(values.values()) == {0}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token_seconds_count"):
        assert values[f"lockstep_{name}"] == values[f"vllm:{name}"] == 0
    for word in FINISHED_REASONS.values():
        assert metrics.value("vllm:request_success_total", "none", finished_reason=word) == 0


def test_gauges_are_read_by_the_scrape_and_rest_when_the_group_is_gone() -> None:
    metrics = Metrics()
    engine = metrics.engine("blue")
    engine.watch(busy)
    for prefix in ("lockstep_", "vllm:"):
        assert metrics.value(f"{prefix}num_requests_running") == 3
        assert metrics.value(f"{prefix}num_requests_waiting") == 2
        assert metrics.value(f"{prefix}kv_cache_usage_perc") == 0.25
        assert metrics.value(f"{prefix}cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert metrics.value("lockstep_scheduler_pages", state="owned") == 25
    engine.unwatch(busy)
    assert metrics.value("lockstep_num_requests_running") == metrics.value("vllm:num_requests_waiting") == 0
    assert metrics.value("lockstep_scheduler_pages", state="owned") == 0


def test_gauges_of_a_group_that_has_drained_are_gone_until_it_comes_again() -> None:
    metrics = Metrics()
    engine = metrics.engine("blue")
    for _ in range(2):
        engine.watch(busy)
        assert metrics.value("lockstep_scheduler_group_ready") == 1
        engine.unwatch(busy, planned=True)
        assert metrics.value("lockstep_scheduler_group_ready") is None
    assert metrics.value("lockstep_generation_tokens_total") == 0


def test_objectives_are_bounds_of_the_histograms() -> None:
    registry = new_registry("scheduler")
    SchedulerMetrics("tiny", True, registry, slo_ttft_s=1.7, slo_itl_s=0.033)
    found = samples(registry)
    for prefix in ("lockstep_", "vllm:"):
        for name, bound in (("time_to_first_token_seconds", "1.7"), ("inter_token_latency_seconds", "0.033")):
            labels = {"model_name": "tiny", "engine": "none", "le": bound}
            assert found[f"{prefix}{name}_bucket", frozenset(labels.items())] == 0


def test_a_request_is_measured_from_its_arrival_to_its_end() -> None:
    metrics = Metrics()
    engine = metrics.engine("blue")
    engine.first_token(prompt_tokens=7, queue_s=0.5, prefill_s=0.25)
    engine.tokens(1, np.empty(0))
    engine.tokens(2, np.array([0.015]))
    engine.ended(FINISH_REASON_STOP, 7, 3, 20, RequestTimes(arrived_at=10.0, admitted_at=10.5, first_token_at=10.75, ended_at=11.75))
    expected = {
        "prompt_tokens_total": 7,
        "generation_tokens_total": 3,
        "time_to_first_token_seconds_sum": 0.75,
        "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 0.25,
        "request_decode_time_seconds_sum": 1.0,
        "request_inference_time_seconds_sum": 1.25,
        "e2e_request_latency_seconds_sum": 1.75,
        "request_time_per_output_token_seconds_sum": 0.5,
        "inter_token_latency_seconds_count": 1,
        "request_params_max_tokens_sum": 20,
    }
    assert {name: metrics.value(f"lockstep_{name}") for name in expected} == expected
    assert metrics.value("lockstep_request_success_total", finished_reason="stop") == 1
    assert metrics.value("vllm:generation_tokens_total") == 3
    assert metrics.value("vllm:inter_token_latency_seconds_bucket", le="0.015") == 1


def test_a_request_that_never_had_a_slot_waited_until_its_end() -> None:
    times = RequestTimes(arrived_at=1.0, admitted_at=None, first_token_at=None, ended_at=3.0)
    assert (times.queue_s, times.ttft_s, times.total_s) == (2.0, None, 2.0)


def test_what_the_cache_saves_is_told_apart_from_what_is_computed() -> None:
    metrics = Metrics()
    engine = metrics.engine("blue")
    engine.admitted(cached_tokens=32, prompt_tokens=40)
    engine.admitted(cached_tokens=48, prompt_tokens=None)  # it is back after a preemption: its own work is no hit
    engine.plan(decode_rows=0, prefill_tokens=8, iterations=1)
    engine.plan(decode_rows=2, prefill_tokens=0, iterations=4)
    engine.planned(0.0003)
    for prefix in ("lockstep_", "vllm:"):
        assert metrics.value(f"{prefix}prefix_cache_queries_total") == 40
        assert metrics.value(f"{prefix}prefix_cache_hits_total") == 32
    tokens = {mode: metrics.value("lockstep_realtime_tokens_total", mode=mode) for mode in TOKEN_MODES}
    assert tokens == {"prefill_compute": 8, "prefill_cache": 80, "decode": 8}
    assert metrics.value("lockstep_scheduler_plan_iterations_bucket", le="1.0") == 1
    assert metrics.value("lockstep_scheduler_plan_iterations_bucket", le="4.0") == 2
    assert metrics.value("lockstep_scheduler_planning_seconds_bucket", le="0.0005") == 1


def test_groups_that_share_a_name_are_added_up() -> None:
    metrics = Metrics()
    engine = metrics.engine("blue")
    engine.watch(busy)
    engine.watch(lambda: BUSY)
    assert metrics.value("lockstep_num_requests_running") == 6
    assert metrics.value("lockstep_kv_cache_usage_perc") == 0.25
    engine.unwatch(busy)
    assert metrics.value("lockstep_num_requests_running") == 3


def test_a_group_that_comes_again_counts_on() -> None:
    metrics = Metrics()
    metrics.engine("blue").tokens(1, np.array([0.1]))
    metrics.engine("blue").tokens(1, np.array([0.1]))
    assert metrics.value("lockstep_generation_tokens_total") == 2


def test_met_05_ever_new_groups_do_not_make_ever_more_series() -> None:
    metrics = Metrics()
    for number in range(MAX_ENGINES):
        metrics.engine(f"group-{number}")
    full = len(samples(metrics.registry))
    for number in range(100):
        metrics.engine(f"another-{number}").tokens(1, np.array([0.1]))
    assert len(samples(metrics.registry)) < 1.01 * full
    assert metrics.value("lockstep_generation_tokens_total", "other") == 100


def test_rejected_requests_are_counted_by_reason() -> None:
    metrics = Metrics()
    metrics.rejected(REJECT_REASON_OVERLOADED)
    labels = {"model_name": "tiny", "reason": "overloaded"}
    assert metrics.registry.get_sample_value("lockstep_scheduler_requests_rejected_total", labels) == 1


def test_what_a_stopping_worker_leaves_undone_is_counted() -> None:
    run = Run()
    for draining in (False, True):
        run.add_group()
        run.submit(1 + draining)
        if draining:
            run.scheduler.drain_group(run.group, 0.0)
        run.scheduler.remove_group(run.group, 0.0)
        assert run.metrics.cut_off_by("worker") == draining


def test_the_twins_can_be_left_out() -> None:
    assert not any(name.startswith("vllm:") for name, _ in samples(Metrics(vllm_names=False).registry))


@pytest.mark.parametrize("model_name", ["tiny", 'a "quoted" \\ name\nof two lines'])
def test_met_07_the_official_parsers_read_it(model_name: str) -> None:
    metrics = Metrics(model_name)
    metrics.engine("blue").watch(lambda: BUSY)
    plain = list(text(generate_latest(metrics.registry).decode()))
    fancy = list(openmetrics(generate_openmetrics(metrics.registry, ALLOWUTF8).decode()))
    for families in (plain, fancy):
        assert {sample.labels.get("model_name", model_name) for family in families for sample in family.samples} == {model_name}
        names = [family.name for family in families]
        assert len(names) == len(set(names)), "HELP and TYPE stand once"
    assert all(sample.name.endswith("_total") for family in fancy if family.type == "counter" for sample in family.samples)


class Run:
    """A scheduler with its metrics and, once added, a group whose results come when they are asked for."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.scheduler = Scheduler(100, 1_000, 10.0, lambda updated, now: None, self.metrics, 0.0)
        self.scheduler.model = Model("abc", vocab_size=50, max_length=64, eos_ids=frozenset({EOS}), files=())
        self.plans: list[Plan] = []

    def add_group(self) -> None:
        limits = Limits(slots=1, pages=41, page_size=4, max_length=64, max_step_tokens=16, vocab_size=50)
        self.device = Device(limits, model=lambda ids, vocab_size: 7)
        engine = self.metrics.engine("blue")
        self.group = Group("blue", limits, 0, 16, False, self.plans.append, self.scheduler.deliver, engine)
        self.scheduler.add_group(self.group, 0.0)

    def submit(self, request: int, max_tokens: int = 20, **fields: Any) -> None:
        assert self.scheduler.submit(session_client.submit(request, [1, 2, 3], max_tokens, **fields), 1, 0.0) is None

    def compute(self, now: float) -> None:
        self.group.on_result(self.device.run(self.plans.pop(0)), now)


def test_requests_that_no_group_has_wait_too() -> None:
    run = Run()
    run.submit(1)
    assert run.metrics.value("lockstep_num_requests_waiting", "none") == 1
    assert run.metrics.value("vllm:num_requests_waiting", "none") == 1
    assert run.metrics.value("lockstep_num_tokens_waiting", "none") == 3
    run.add_group()
    assert run.metrics.value("lockstep_num_requests_waiting", "none") == 0
    assert run.metrics.value("lockstep_num_requests_running") == 1


@pytest.mark.parametrize("stopped, reason", [(True, "stop"), (False, "abort")])
def test_a_stop_string_that_the_gateway_meets_is_a_stop(stopped: bool, reason: str) -> None:
    run = Run()
    run.add_group()
    run.submit(1)
    run.compute(1.0)
    run.scheduler.cancel(Key(1, 1), 1, 2.0, stopped=stopped)
    assert run.metrics.value("lockstep_request_success_total", finished_reason=reason) == 1


def test_a_whole_run_is_timed_by_the_scheduler_and_leaves_nothing_behind() -> None:
    run = Run()
    run.add_group()
    run.submit(1, max_tokens=2)
    run.submit(2, max_tokens=1)
    assert run.metrics.value("lockstep_num_requests_waiting") == 1
    for now in (0.5, 0.75):
        run.compute(now)
    assert run.metrics.value("lockstep_time_to_first_token_seconds_sum") == 0.5
    assert run.metrics.value("lockstep_inter_token_latency_seconds_sum") == 0.25
    assert run.metrics.value("lockstep_e2e_request_latency_seconds_sum") == 0.75
    run.compute(1.0)
    assert run.metrics.value("lockstep_request_queue_time_seconds_sum") == 0.75
    assert run.metrics.value("lockstep_generation_tokens_total") == 3
    assert run.metrics.value("lockstep_prompt_tokens_total") == 6
    assert run.metrics.value("lockstep_request_success_total", finished_reason="length") == 2
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "scheduler_lead_seconds"):
        assert run.metrics.value(f"lockstep_{gauge}") == 0


def test_each_iteration_of_a_burst_is_a_step_with_tokens_of_its_own() -> None:
    run = Run()
    run.add_group()
    run.submit(1, max_tokens=9)
    computed = 0
    while run.plans:
        computed += 1
        run.compute(0.1 * computed)
    assert computed < 9, "no bursts: this test shows nothing"
    assert run.metrics.value("lockstep_iteration_tokens_total_count") == run.metrics.value("lockstep_scheduler_step_seconds_count") == 9
    assert run.metrics.value("lockstep_inter_token_latency_seconds_count") == 8
    assert run.metrics.value("lockstep_inter_token_latency_seconds_sum") == pytest.approx(0.1 * (computed - 1), abs=0.02)


def test_a_superseded_attempt_is_not_an_end() -> None:
    run = Run()
    run.add_group()
    run.submit(1)
    run.submit(1, attempt=2)
    assert all(run.metrics.value("lockstep_request_success_total", finished_reason=word) == 0 for word in FINISHED_REASONS.values())
