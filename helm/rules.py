"""Recording rules and alerts for Prometheus: the one place from which the chart's files/rules.yaml is generated.

The file works as it is, with the objectives that are the chart's defaults; the chart puts in the release's own where they differ
(templates/monitoring/_slo.tpl knows where they stand). Rules see what matches ANYWHERE, which the chart narrows to its namespace.
"""

from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.utils import floatToGoString

from helm.values import Objectives, PrometheusRule

ANYWHERE = 'namespace=~".*"'
GROUP_LABELS = "namespace, model_name, engine"
FAULT = 'code=~"5.."'
ANSWERS = 'endpoint=~"/v1/(chat/)?completions"'
WINDOWS = ("5m", "30m", "1h", "6h")
RUNBOOKS = PrometheusRule().runbookUrl


@dataclass(frozen=True)
class Alert:
    """One of RUNBOOKS' sections has its name."""

    name: str
    expr: str
    lasting: str  # for so long before it fires
    severity: Literal["warning", "critical"]
    summary: str

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": f"{RUNBOOKS}#{self.name.lower()}"},
        }


def series(name: str, *matchers: str) -> str:
    return f"{name}{{{','.join((ANYWHERE, *matchers))}}}"


def rate(name: str, *matchers: str, by: str, window: str) -> str:
    return f"sum by ({by}) (rate({series(name, *matchers)}[{window}]))"


def misses(slo: str, window: str, objectives: Objectives) -> str:
    """Share of what missed the objective; nothing while there is nothing to judge."""
    if slo == "availability":
        total = rate("lockstep_gateway_requests_total", ANSWERS, by="namespace", window=window)
        failed = rate("lockstep_gateway_requests_total", ANSWERS, FAULT, by="namespace", window=window)
        return f"{failed} / ({total} > 0)"
    name = {"ttft": "time_to_first_token", "itl": "inter_token_latency"}[slo]
    bound = f'le="{floatToGoString(objectives.ttftSeconds if slo == "ttft" else objectives.itlSeconds)}"'
    histogram, by = f"lockstep_gateway_{name}_seconds", "namespace, model_name"
    total = rate(f"{histogram}_count", by=by, window=window)
    return f"1 - {rate(f'{histogram}_bucket', bound, by=by, window=window)} / ({total} > 0)"


def burn_rules(objectives: Objectives) -> list[dict[str, Any]]:
    """How many times faster than the objective allows its misses come: 1 uses up exactly what is allowed."""
    shares = {"ttft": objectives.ttftShare, "itl": objectives.itlShare, "availability": objectives.availability}
    return [
        {
            "record": f"lockstep:slo_burn:ratio_rate{window}",
            "expr": f"({misses(slo, window, objectives)}) / (1 - {share})",
            "labels": {"slo": slo},
        }
        for window in WINDOWS
        for slo, share in shares.items()
    ]


def quantile(share: float, name: str, *, by: str, window: str = "5m") -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', by=f'{by}, le', window=window)})"


def backlog_seconds(tokens: str, tokens_per_second: str) -> str:
    """What waits, in seconds of one group's time: 0 with nothing waiting, nothing while no group's speed is known."""
    return f"({tokens} == 0) or {tokens} / {tokens_per_second}"


RECORDED = (
    (
        "lockstep:time_to_first_token_seconds:p95",
        quantile(0.95, "lockstep_gateway_time_to_first_token_seconds", by="namespace, model_name"),
    ),
    (
        "lockstep:inter_token_latency_seconds:p95",
        quantile(0.95, "lockstep_gateway_inter_token_latency_seconds", by="namespace, model_name"),
    ),
    (
        "lockstep:backlog:seconds",
        backlog_seconds(
            f"sum by (namespace, model_name) ({series('lockstep_num_tokens_waiting')})",
            f"avg by (namespace, model_name) ({series('lockstep_scheduler_prefill_tokens_per_second')} > 0)",
        ),
    ),
)

LEADS = series("lockstep_scheduler_leads")
READY = series("lockstep_scheduler_group_ready")
LOST = series("lockstep_scheduler_group_ready", 'engine!~"none|other"') + " == 0"
COMPUTED = rate("lockstep_realtime_tokens_total", 'mode!="prefill_cache"', by=GROUP_LABELS, window="1m")
REJECTED = rate("lockstep_gateway_rejections_total", 'reason="overloaded"', by="namespace", window="5m")
BROKEN = rate("lockstep_request_success_total", 'finished_reason="error"', by="namespace, model_name", window="5m")
FAILED = rate("lockstep_gateway_requests_total", ANSWERS, FAULT, by="namespace", window="5m")
ANSWERED = rate("lockstep_gateway_requests_total", ANSWERS, by="namespace", window="5m")
ENDED = rate("lockstep_request_success_total", by="namespace, model_name", window="5m")
CUT_OFF = series("lockstep_scheduler_requests_cut_off_total")

ALERTS = (
    Alert(
        "LockstepNoLeader",
        f"sum by (namespace, model_name) ({LEADS}) == 0 or absent({LEADS})",
        "30s",
        "critical",
        "No scheduler leads: nothing is computed.",
    ),
    Alert(
        "LockstepMetricsAbsent",
        " or ".join(
            f'label_replace(absent({series(name)}), "service", "{service}", "", "")'
            for name, service in (("lockstep_gateway_backend_up", "gateway"), ("lockstep_worker_ready", "worker"))
        ),
        "5m",
        "warning",
        "No {{ $labels.service }} is scraped: it does not run, or Prometheus does not reach it.",
    ),
    Alert(
        "LockstepGatewayCutOff",
        f"min by (namespace, instance, backend) ({series('lockstep_gateway_backend_up')}) == 0",
        "1m",
        "critical",
        "The gateway at {{ $labels.instance }} has no session with a scheduler.",
    ),
    Alert(
        "LockstepNoGroup",
        f"sum by (namespace, model_name) ({READY}) == 0",
        "1m",
        "critical",
        "No worker group of {{ $labels.model_name }} takes requests.",
    ),
    Alert(
        "LockstepGroupDown",
        f"max by ({GROUP_LABELS}) ({LOST} and on (job, instance) {LEADS} == 1)",
        "1m",
        "warning",
        "Worker group {{ $labels.engine }} is lost or ejected.",
    ),
    Alert(
        "LockstepGroupUnused",
        f"max by (namespace, engine) ({series('lockstep_worker_ready')}) == 1"
        f" unless on (namespace, engine) max by (namespace, engine) ({READY}) == 1",
        "5m",
        "warning",
        "Worker group {{ $labels.engine }} is ready, and no scheduler uses it.",
    ),
    Alert(
        "LockstepGroupStalled",
        f"sum by ({GROUP_LABELS}) ({series('lockstep_num_requests_running')}) > 0 and {COMPUTED} == 0",
        "30s",
        "critical",
        "Worker group {{ $labels.engine }} has {{ $value }} requests running and computes nothing.",
    ),
    Alert(
        "LockstepStartSlow",
        f"max by (namespace, engine) ({series('lockstep_worker_ready')}) == 0",
        "30m",
        "warning",
        "Worker group {{ $labels.engine }} has been starting for half an hour.",
    ),
    Alert(
        "LockstepDrainExceeded",
        f"sum by (namespace, model_name, component) (increase({CUT_OFF}[10m])) > 0",
        "0s",
        "warning",
        "The time of a {{ $labels.component }} that stopped was over before about {{ $value | humanize }} of its requests were.",
    ),
    Alert(
        "LockstepOverload",
        f"{REJECTED} / {ANSWERED} > 0.01",
        "2m",
        "warning",
        "{{ $value | humanizePercentage }} of requests are turned away with 429.",
    ),
    Alert(
        "LockstepBacklog",
        "lockstep:backlog:seconds{" + ANYWHERE + "} > 30",
        "5m",
        "warning",
        "What waits for {{ $labels.model_name }} is {{ $value | humanizeDuration }} of a group's work.",
    ),
    Alert("LockstepErrors", f"{FAILED} / {ANSWERED} > 0.05", "2m", "critical", "{{ $value | humanizePercentage }} of answers are 5xx."),
    Alert("LockstepSomeErrors", f"{FAILED} / {ANSWERED} > 0.01", "10m", "warning", "{{ $value | humanizePercentage }} of answers are 5xx."),
    Alert(
        "LockstepAnswersBreak",
        f"{BROKEN} / {ENDED} > 0.01",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model_name }} end with an error.",
    ),
    Alert(
        "LockstepObjectiveBurnsFast",
        f"lockstep:slo_burn:ratio_rate1h{{{ANYWHERE}}} > 14.4 and lockstep:slo_burn:ratio_rate5m{{{ANYWHERE}}} > 14.4",
        "2m",
        "critical",
        "The objective for {{ $labels.slo }} is missed {{ $value | humanize }} times as often as it allows: a month's share in two days.",
    ),
    Alert(
        "LockstepObjectiveBurnsSlowly",
        f"lockstep:slo_burn:ratio_rate6h{{{ANYWHERE}}} > 6 and lockstep:slo_burn:ratio_rate30m{{{ANYWHERE}}} > 6",
        "15m",
        "warning",
        "The objective for {{ $labels.slo }} is missed {{ $value | humanize }} times as often as it allows: a month's share in five days.",
    ),
    Alert(
        "LockstepKvCacheFull",
        f"max by ({GROUP_LABELS}) ({series('lockstep_kv_cache_usage_perc')}) > 0.95",
        "10m",
        "warning",
        "Running requests hold {{ $value | humanizePercentage }} of the KV cache of {{ $labels.engine }}.",
    ),
    Alert(
        "LockstepPreemptions",
        f"{rate('lockstep_num_preemptions_total', by=GROUP_LABELS, window='5m')} > 0.5",
        "5m",
        "warning",
        "{{ $labels.engine }} takes {{ $value | humanize }} requests a second out of their slots for want of pages.",
    ),
    Alert(
        "LockstepPlansRefused",
        f"sum by (namespace, engine) (increase({series('lockstep_worker_plans_refused_total')}[10m])) > 0",
        "0s",
        "critical",
        "{{ $labels.engine }} refused plans that would have done harm: scheduler and worker disagree.",
    ),
    Alert(
        "LockstepLoopLate",
        f"{quantile(0.99, 'lockstep_event_loop_lag_seconds', by='namespace, job, instance')} > 0.5",
        "5m",
        "warning",
        "The event loop of {{ $labels.instance }} is {{ $value | humanizeDuration }} late: it wants CPU.",
    ),
)


def rules(objectives: Objectives) -> dict[str, Any]:
    """A rule file of Prometheus."""
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDED]
    return {
        "groups": [
            {"name": "lockstep-recorded", "rules": recorded},
            {"name": "lockstep-objectives", "rules": burn_rules(objectives)},
            {"name": "lockstep-alerts", "rules": [alert.rule() for alert in ALERTS]},
        ]
    }
