"""Each alert in promtool's own time: it fires in one course of events, and stays silent in another that is nearly as bad."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from helm.rules import ALERTS
from tests.system.chart.conftest import CHART

Series = dict[str, str]  # to values, one for each interval: "0+6x10" begins at 0 and gains 6 ten times

SCHEDULER = 'namespace="models",model_name="m",job="lockstep",instance="s"'
STANDBY = 'namespace="models",model_name="m",job="lockstep",instance="t"'
WORKER = 'namespace="models",job="lockstep",instance="w",engine="g"'
GATEWAY = 'namespace="models",job="lockstep",instance="a"'
ENGINE = f'{SCHEDULER},engine="g"'
OF_ENGINE = {"namespace": "models", "model_name": "m", "engine": "g"}


@dataclass(frozen=True)
class Case:
    alert: str
    minutes: int  # when it is looked at
    firing: Series
    labels: dict[str, str]
    summary: str
    silent: Series
    interval: str = "1m"  # of the values


def requests(ok: str, failed: str) -> Series:
    labels = f'{GATEWAY},model_name="m",endpoint="/v1/completions",stream="true"'
    return {
        f'lockstep_gateway_requests_total{{{labels},code="200"}}': ok,
        f'lockstep_gateway_requests_total{{{labels},code="503"}}': failed,
    }


def rejections(rejected: str) -> Series:
    return requests("0+600x20", "0x20") | {f'lockstep_gateway_rejections_total{{{GATEWAY},reason="overloaded"}}': rejected}


def first_tokens(late: str, minutes: int) -> Series:
    """A hundred a minute."""
    labels = f'{GATEWAY},model_name="m",endpoint="/v1/completions"'
    return {
        f'lockstep_gateway_time_to_first_token_seconds_bucket{{{labels},le="2.0"}}': late,
        f"lockstep_gateway_time_to_first_token_seconds_count{{{labels}}}": f"0+100x{minutes}",
    }


def ended(errors: str) -> Series:
    return {
        f'lockstep_request_success_total{{{ENGINE},finished_reason="stop"}}': "0+600x20",
        f'lockstep_request_success_total{{{ENGINE},finished_reason="error"}}': errors,
    }


READY, LEADS = f"lockstep_scheduler_group_ready{{{ENGINE}}}", f"lockstep_scheduler_leads{{{SCHEDULER}}}"
RUNNING = f"lockstep_num_requests_running{{{ENGINE}}}"
COMPUTED = f'lockstep_realtime_tokens_total{{{ENGINE},mode="decode"}}'
WAITING = f"lockstep_num_tokens_waiting{{{ENGINE}}}"
SPEED = f"lockstep_scheduler_prefill_tokens_per_second{{{ENGINE}}}"
USABLE = f"lockstep_worker_ready{{{WORKER}}}"
BACKEND = f'lockstep_gateway_backend_up{{{GATEWAY},backend="s:7100"}}'
USAGE = f"lockstep_kv_cache_usage_perc{{{ENGINE}}}"
PREEMPTED = f"lockstep_num_preemptions_total{{{ENGINE}}}"
REFUSED = f"lockstep_worker_plans_refused_total{{{WORKER}}}"
CUT_OFF = f'lockstep_scheduler_requests_cut_off_total{{{{{SCHEDULER},component="{{}}"}}}}'
LAG = "lockstep_event_loop_lag_seconds_bucket"


def lag(prompt: str) -> Series:
    return {f'{LAG}{{{GATEWAY},le="0.1"}}': prompt, f'{LAG}{{{GATEWAY},le="1.0"}}': "0+60x20", f'{LAG}{{{GATEWAY},le="+Inf"}}': "0+60x20"}


CASES = [
    Case(
        "LockstepNoLeader",
        5,
        {LEADS: "1 1 0x10", f"lockstep_scheduler_leads{{{STANDBY}}}": "0x12"},
        {"namespace": "models", "model_name": "m"},
        "No scheduler leads: nothing is computed.",
        {LEADS: "1 1 0x10", f"lockstep_scheduler_leads{{{STANDBY}}}": "0 0 1x10"},  # the standby has taken over
    ),
    Case(
        "LockstepMetricsAbsent",
        15,
        {BACKEND: "1x20", USABLE: "1x2 stale"},
        {"service": "worker"},
        "No worker is scraped: it does not run, or Prometheus does not reach it.",
        {BACKEND: "1x20", USABLE: "1x8 stale _x4 1x20"},  # a short gap
    ),
    Case(
        "LockstepGatewayCutOff",
        5,
        {BACKEND: "1 0x10"},
        {"namespace": "models", "instance": "a", "backend": "s:7100"},
        "The gateway at a has no session with a scheduler.",
        {BACKEND: "1 0 1x10"},
    ),
    Case(
        "LockstepNoGroup",
        5,
        {READY: "1 0x10"},
        {"namespace": "models", "model_name": "m"},
        "No worker group of m takes requests.",
        {READY: "1 0x10", READY.replace('"g"', '"h"'): "1x11"},
    ),
    Case(
        "LockstepGroupDown",
        5,
        {LEADS: "1x10", READY: "1 0x10"},
        OF_ENGINE,
        "Worker group g is lost or ejected.",
        # Drained, so that its series ended; and a former leader still has it at 0.
        {LEADS: "1x10", READY: "1 0 stale", f"lockstep_scheduler_leads{{{STANDBY}}}": "0x10", READY.replace('"s"', '"t"'): "0x10"},
    ),
    Case(
        "LockstepGroupUnused",
        10,
        {USABLE: "1x10", READY: "0x10"},
        {"namespace": "models", "engine": "g"},
        "Worker group g is ready, and no scheduler uses it.",
        {USABLE: "1x10", READY: "0 0 0 1x10"},
    ),
    Case(
        "LockstepGroupStalled",
        4,
        {RUNNING: "3x20", COMPUTED: "0+60x2 180x20"},
        OF_ENGINE,
        "Worker group g has 3 requests running and computes nothing.",
        {RUNNING: "3x4 0x20", COMPUTED: "0+60x4 240x20"},  # nothing to do
        interval="15s",
    ),
    Case(
        "LockstepStartSlow",
        40,
        {USABLE: "0x40"},
        {"namespace": "models", "engine": "g"},
        "Worker group g has been starting for half an hour.",
        {USABLE: "0x28 1x20"},
    ),
    Case(
        "LockstepDrainExceeded",
        10,
        {CUT_OFF.format("worker"): "0 0 0 0 2x20", CUT_OFF.format("gateway"): "0x20"},
        {"namespace": "models", "model_name": "m", "component": "worker"},
        "The time of a worker that stopped was over before about 2 of its requests were.",
        {CUT_OFF.format("worker"): "2x20", CUT_OFF.format("gateway"): "0x20"},  # long ago; whoever stopped since was done in time
    ),
    Case(
        "LockstepOverload",
        10,
        rejections("0+60x20"),
        {"namespace": "models"},
        "10% of requests are turned away with 429.",
        rejections("0+3x20"),
    ),
    Case(
        "LockstepBacklog",
        10,
        {WAITING: "400000x12", SPEED: "10000x12"},
        {"namespace": "models", "model_name": "m"},
        "What waits for m is 40s of a group's work.",
        {WAITING: "200000x12", SPEED: "10000x12"},
    ),
    Case(
        "LockstepErrors",
        10,
        requests("0+90x20", "0+10x20"),
        {"namespace": "models"},
        "10% of answers are 5xx.",
        requests("0+96x20", "0+4x20"),
    ),
    Case(
        "LockstepSomeErrors",
        18,
        requests("0+96x20", "0+4x20"),
        {"namespace": "models"},
        "4% of answers are 5xx.",
        requests("0+199x20", "0+1x20"),
    ),
    Case(
        "LockstepAnswersBreak",
        15,
        ended("0+24x20"),
        {"namespace": "models", "model_name": "m"},
        "3.846% of the requests to m end with an error.",
        ended("0+3x20"),
    ),
    Case(
        "LockstepObjectiveBurnsFast",
        65,
        first_tokens("0+20x70", 70),
        {"namespace": "models", "model_name": "m", "slo": "ttft"},
        "The objective for ttft is missed 16 times as often as it allows: a month's share in two days.",
        first_tokens("0+20x55 1100+100x20", 75),  # it was bad, and is over
    ),
    Case(
        "LockstepObjectiveBurnsSlowly",
        90,
        first_tokens("0+60x100", 100),
        {"namespace": "models", "model_name": "m", "slo": "ttft"},
        "The objective for ttft is missed 8 times as often as it allows: a month's share in five days.",
        first_tokens("0+80x100", 100),
    ),
    Case(
        "LockstepKvCacheFull",
        15,
        {USAGE: "0.97x20"},
        OF_ENGINE,
        "Running requests hold 97% of the KV cache of g.",
        {USAGE: "0.97x8 0.9x20"},
    ),
    Case(
        "LockstepPreemptions",
        15,
        {PREEMPTED: "0+120x20"},
        OF_ENGINE,
        "g takes 2 requests a second out of their slots for want of pages.",
        {PREEMPTED: "0+12x20"},
    ),
    Case(
        "LockstepPlansRefused",
        5,
        {REFUSED: "0 0 1x10"},
        {"namespace": "models", "engine": "g"},
        "g refused plans that would have done harm: scheduler and worker disagree.",
        {REFUSED: "7x12"},  # long ago
    ),
    Case(
        "LockstepLoopLate",
        15,
        lag("0+30x20"),
        {"namespace": "models", "job": "lockstep", "instance": "a"},
        "The event loop of a is 982ms late: it wants CPU.",
        lag("0+60x20"),
    ),
]


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == [alert.name for alert in ALERTS]


def unit(case: Case, series: Series, expected: list[dict[str, object]]) -> dict[str, object]:
    return {
        "interval": case.interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{case.minutes}m", "alertname": case.alert, "exp_alerts": expected}],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_it_fires_and_it_stays_silent(case: Case, promtool: str, tmp_path: Path) -> None:
    severity = next(alert.severity for alert in ALERTS if alert.name == case.alert)
    annotations = {"summary": case.summary, "runbook_url": f"docs/runbooks.md#{case.alert.lower()}"}
    fired: dict[str, object] = {"exp_labels": {"severity": severity, **case.labels}, "exp_annotations": annotations}
    tests = {
        "rule_files": [str(CHART / "files/rules.yaml")],
        "evaluation_interval": "30s",
        "tests": [unit(case, case.firing, [fired]), unit(case, case.silent, [])],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run([promtool, "test", "rules", str(tmp_path / "tests.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, re.sub(r", *\n", "\n", done.stdout + done.stderr)
