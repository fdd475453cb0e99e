"""What rules, dashboards and scaling ask for: it parses, it exists, and the objectives are everywhere the same."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helm.grafana import DATASOURCE, OPTIONS, WIDTH
from helm.rules import ALERTS
from tests.system.chart.conftest import ROOT, Helm, merged, of_kind
from tests.system.monitoring.conftest import (
    EVERYTHING,
    Object,
    adapter_expressions,
    committed_dashboards,
    dashboards,
    panel_expressions,
    panels,
    rule_expressions,
    rules,
    scaling_expressions,
    selectors,
)

OF_PROMETHEUS = {"namespace", "job", "instance", "alertname", "alertstate", "slo"}
OF_OPERATOR = {"namespace", "container", "pod", "job", "endpoint", "instance"}  # labels that it gives what a PodMonitor scrapes
UNITS = {"bytes", "none", "percentunit", "reqps", "s", "short"}  # as Grafana calls them
SAMPLES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def objects(helm: Helm) -> list[Object]:
    return helm.objects(EVERYTHING)


def expressions(objects: list[Object]) -> Iterator[tuple[str, str]]:
    yield from panel_expressions(dashboards(objects))
    yield from rule_expressions(rules(objects))
    yield from scaling_expressions(objects)
    yield from adapter_expressions()


def documented() -> dict[str, set[str]]:
    """Series of docs/metrics.md to their labels."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"\| `(lockstep_\w+)` \| (\w+) \| ([^|]*) \|", (ROOT / "docs/metrics.md").read_text()):
        own = set(re.findall(r"`(\w+)`", labels))
        names = [name + suffix for suffix in SAMPLES] if kind == "histogram" else [name]
        found |= {each: own | ({"le"} if each.endswith("_bucket") else set()) for each in names}
    return found


def test_every_series_and_label_that_is_asked_for_is_documented(objects: list[Object]) -> None:
    known = documented() | {"ALERTS": set(), "lockstep_build_info": {"service", "version"}}
    known |= {name: {"slo"} for name, _ in rule_expressions(rules(objects)) if ":" in name}
    asked = [(place, selector) for place, expr in expressions(objects) for selector in selectors(expr)]
    assert len(asked) > 150
    for place, selector in asked:
        assert selector.name is not None, place
        if selector.name.startswith("process_"):
            continue
        assert selector.name in known, f"{place}: {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= known[selector.name] | OF_PROMETHEUS, f"{place}: {selector.name} has no {labels - known[selector.name]}"


def test_rules_see_their_own_namespace_alone(objects: list[Object]) -> None:
    for place, expr in rule_expressions(rules(objects)):
        for selector in selectors(expr):
            scope = [(matcher.name, matcher.value) for matcher in selector.matchers.matchers if matcher.name == "namespace"]
            assert scope == [("namespace", "models")], place


def test_objectives_come_from_one_place(helm: Helm) -> None:
    slo = {"ttftSeconds": 3, "ttftShare": "0.9", "itlSeconds": 0.033, "itlShare": 0.8, "availability": 0.97}
    objects = helm.objects(merged(EVERYTHING, {"monitoring": {"slo": slo}}))
    bounds: dict[str, set[str]] = {"time_to_first_token": set(), "inter_token_latency": set()}
    for _, expr in expressions(objects):
        for name, found in bounds.items():
            if name in expr:
                found |= set(re.findall(r'le="([^"]+)"', expr))
    assert bounds == {"time_to_first_token": {"3.0"}, "inter_token_latency": {"0.033"}}
    burns = [rule for group in rules(objects)["groups"] for rule in group["rules"] if "slo_burn" in rule.get("record", "")]
    assert {(rule["labels"]["slo"], rule["expr"].rsplit(" / ")[-1]) for rule in burns} == {
        ("ttft", "(1 - 0.9)"),
        ("itl", "(1 - 0.8)"),
        ("availability", "(1 - 0.97)"),
    }
    lines = {
        (panel["title"], step["value"])
        for panel in panels(dashboards(objects)["lockstep-overview.json"])
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        if "objective" in step
    }
    assert lines == {
        ("First tokens in time", 0.9),
        ("Tokens in time", 0.8),
        ("No fault of ours", 0.97),
        ("Time to first token", 3),
        ("Inter-token latency", 0.033),
    }
    for component in ("gateway", "scheduler"):
        container = of_kind(objects, "Deployment", component)["spec"]["template"]["spec"]["containers"][0]
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert env[f"LOCKSTEP_{component.upper()}_SLO_TTFT_S"] == "3"
        assert env[f"LOCKSTEP_{component.upper()}_SLO_ITL_S"] == "0.033"


def test_the_chart_changes_nothing_of_a_dashboard_but_objectives(objects: list[Object]) -> None:
    assert {f"lockstep-{name}": dashboard for name, dashboard in committed_dashboards().items()} == dashboards(objects)


@pytest.mark.parametrize("name, dashboard", committed_dashboards().items(), ids=committed_dashboards())
def test_a_dashboard_opens_anywhere(name: str, dashboard: Object) -> None:
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "namespace", "model_name", "engine"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for variable in dashboard["templating"]["list"]:
        assert variable["type"] == "datasource" or variable["datasource"] == DATASOURCE
        assert "current" not in variable or variable["current"].keys() >= {"text", "value"}
    for link in dashboard["links"]:
        assert link.keys() >= {"title", "type", "icon", "tooltip", "tags", "asDropdown", "targetBlank", "includeVars", "keepTime"}
    for panel in panels(dashboard):
        assert panel["type"] in OPTIONS
        assert panel["datasource"] == DATASOURCE
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        first, *more = (step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"])
        assert first is None
        assert more == sorted(more)
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert panel["type"] == "stat" or all(legends), panel["title"]
        assert len(legends) == len(set(legends)), panel["title"]


def test_every_alert_leads_to_its_runbook(helm: Helm) -> None:
    page = (ROOT / "docs/runbooks.md").read_text()
    assert re.findall(r"^## (Lockstep\w+)$", page, re.MULTILINE) == [alert.name for alert in ALERTS]
    url = "https://example.com/runbooks"
    values = merged(EVERYTHING, {"monitoring": {"prometheusRule": {"runbookUrl": url}}})
    for group in rules(helm.objects(values))["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["annotations"]["runbook_url"] == f"{url}#{rule['alert'].lower()}"


def test_nobody_gives_a_series_a_label_that_it_has_itself(helm: Helm) -> None:
    own = {label for labels in documented().values() for label in labels}
    monitors = [each for each in helm.objects({"monitoring": {"podMonitor": {"enabled": True}}}) if each["kind"] == "PodMonitor"]
    assert len(monitors) == 3
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        dropped = {rule["regex"] for rule in endpoint["relabelings"] if rule["action"] == "labeldrop"}
        assert not own & (OF_OPERATOR - dropped)
    config = of_kind(helm.objects({"monitoring": {"stack": {"enabled": True}}}), "ConfigMap", "prometheus")["data"]["prometheus.yml"]
    (scrape,) = yaml.safe_load(config)["scrape_configs"]
    assert not own & {rule["target_label"] for rule in scrape["relabel_configs"] if "target_label" in rule}


LEADER, STANDBY = (f'namespace="models",model_name="tiny",job="lockstep",instance="{name}"' for name in ("leader", "standby"))
SCHEDULERS = {
    f"lockstep_scheduler_leads{{{STANDBY}}}": 0,
    f'lockstep_num_requests_running{{{STANDBY},engine="none"}}': 0,
    f'lockstep_num_tokens_waiting{{{STANDBY},engine="none"}}': 0,
}
LEADS = {f"lockstep_scheduler_leads{{{LEADER}}}": 1}
BUSY = {f'lockstep_num_requests_running{{{LEADER},engine="g"}}': 7, f'lockstep_num_tokens_waiting{{{LEADER},engine="g"}}': 900}
IDLE = {f'lockstep_num_requests_running{{{LEADER},engine="g"}}': 0, f'lockstep_num_tokens_waiting{{{LEADER},engine="g"}}': 0}
SPEED = {f'lockstep_scheduler_prefill_tokens_per_second{{{LEADER},engine="g"}}': 300}


@pytest.mark.parametrize(
    "series, expected",
    [
        (SCHEDULERS | LEADS | BUSY | SPEED, {"lockstep_backlog_seconds": 3, "lockstep_num_requests_running": 7}),
        (SCHEDULERS | LEADS | IDLE, {"lockstep_backlog_seconds": 0, "lockstep_num_requests_running": 0}),
        (SCHEDULERS | LEADS | BUSY, {"lockstep_num_requests_running": 7}),  # nobody knows yet how fast a group is
        (SCHEDULERS, {}),  # the leader is not scraped
        ({}, {}),
    ],
    ids=["busy", "idle", "no speed", "no leader", "nothing"],
)
def test_scaling_sees_the_leader_or_nothing(
    objects: list[Object], promtool: str, tmp_path: Path, series: dict[str, int], expected: dict[str, int]
) -> None:
    of_keda = ((name, expr) for (name, _), (_, expr) in zip(adapter_expressions(), scaling_expressions(objects), strict=True))
    cases = [
        {
            "expr": expr,
            "eval_time": "1m",
            "exp_samples": [{"labels": '{namespace="models"}', "value": expected[name]}] if name in expected else [],
        }
        for name, expr in (*adapter_expressions(), *of_keda)
    ]
    unit = {"interval": "1m", "input_series": [{"series": name, "values": f"{value}x2"} for name, value in series.items()]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [unit | {"promql_expr_test": cases}]}))
    done = subprocess.run([promtool, "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scaling_holds_without_data(helm: Helm, objects: list[Object]) -> None:
    scaled = of_kind(objects, "ScaledObject")["spec"]
    assert "fallback" not in scaled  # a fixed number would be put in place of the groups that there are
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in scaled["triggers"])
    assert all(trigger["metricType"] == "AverageValue" for trigger in scaled["triggers"])  # groups that start count as those that run
    plain = of_kind(helm.objects({"worker": {"autoscaling": {"enabled": True, "type": "hpa"}}}), "HorizontalPodAutoscaler")["spec"]
    assert [metric["object"]["metric"]["name"] for metric in plain["metrics"]] == [name for name, _ in adapter_expressions()]
    thresholds = [metric["object"]["target"]["averageValue"] for metric in plain["metrics"]]
    assert thresholds == [trigger["metadata"]["threshold"] for trigger in scaled["triggers"]]
    for spec in (plain["behavior"], scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]):
        assert spec["scaleDown"]["stabilizationWindowSeconds"] >= 300
