"""What worker groups are scaled by: values for the chart of prometheus-adapter, from whose file our ScaledObject takes its queries too.

The scheduler that leads is asked alone: a standby counts no requests, and its 0 would stand for those of a leader that is not scraped.
"""

from typing import Any

from helm.rules import backlog_seconds

MATCHERS, GROUP_BY = "<<.LabelMatchers>>", "<<.GroupBy>>"  # the adapter's placeholders
WAITING, RUNNING = "lockstep_num_tokens_waiting", "lockstep_num_requests_running"


def of_leader(name: str) -> str:
    leads = f"lockstep_scheduler_leads{{{MATCHERS}}} == 1"
    return f"sum by ({GROUP_BY}) ({name}{{{MATCHERS}}} and on (job, instance) {leads})"


SPEED = f"avg by ({GROUP_BY}) (lockstep_scheduler_prefill_tokens_per_second{{{MATCHERS}}} > 0)"
METRICS = (  # the series that says whether there is one, its name, its query
    (WAITING, "lockstep_backlog_seconds", backlog_seconds(of_leader(WAITING), SPEED)),
    (RUNNING, RUNNING, of_leader(RUNNING)),
)


def adapter_values() -> dict[str, Any]:
    """Of a namespace, without data none: an autoscaler then leaves the number of groups as it is."""
    return {
        "rules": {
            "custom": [
                {
                    "seriesQuery": f'{series}{{namespace!=""}}',
                    "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
                    "name": {"as": name},
                    "metricsQuery": query,
                }
                for series, name, query in METRICS
            ]
        }
    }
