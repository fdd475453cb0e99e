"""`monitoring.stack`: what its parts say of each other fits, and Prometheus takes its configuration."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.system.chart.conftest import Helm, merged, of_kind, workloads
from tests.system.monitoring.conftest import EVERYTHING, Object, dashboards

ALLOWED = {"networkPolicy": {"monitoringFrom": [{"namespaceSelector": {"matchLabels": {"team": "operations"}}}]}}


@pytest.fixture(scope="module")
def objects(helm: Helm) -> list[Object]:
    return helm.objects(merged(EVERYTHING, ALLOWED))


def configuration(objects: list[Object], component: str) -> dict[str, str]:
    data: dict[str, str] = of_kind(objects, "ConfigMap", component)["data"]
    return data


def pod(objects: list[Object], component: str) -> Object:
    (template,) = (template for name, _, template in workloads(objects) if name == component)
    return template


def test_prometheus_takes_its_configuration(objects: list[Object], promtool: str, tmp_path: Path) -> None:
    data = configuration(objects, "prometheus")
    config = yaml.safe_load(data["prometheus.yml"])
    (scrape,) = config["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"own_namespace": True}}]  # Debian's build has none
    assert config["rule_files"] == ["/etc/prometheus/rules.yml"]
    (tmp_path / "rules.yml").write_text(data["rules.yml"])
    config["rule_files"] = [str(tmp_path / "rules.yml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run([promtool, "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_scrapes_the_pods_of_its_release_and_no_others(objects: list[Object]) -> None:
    (scrape,) = yaml.safe_load(configuration(objects, "prometheus")["prometheus.yml"])["scrape_configs"]
    keep = next(rule for rule in scrape["relabel_configs"] if rule.get("action") == "keep")
    assert keep["source_labels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_instance", "__meta_kubernetes_pod_container_port_name"]

    def scraped(rendered: list[Object]) -> set[str]:
        return {
            component
            for component, _, template in workloads(rendered)
            for port in template["spec"]["containers"][0]["ports"]
            if re.fullmatch(keep["regex"], f"{template['metadata']['labels']['app.kubernetes.io/instance']};{port['name']}")
        }

    assert scraped(objects) == {"gateway", "scheduler", "worker"}
    (role,) = (each for each in objects if each["kind"] == "Role" and each["metadata"]["name"].endswith("-prometheus"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_its_scrapes_and_grafanas_questions_pass_the_network_policies(objects: list[Object]) -> None:
    def may_enter(component: str, port: str, peer: str) -> bool:
        rules = of_kind(objects, "NetworkPolicy", component)["spec"]["ingress"]
        peers = [each for rule in rules if rule.get("ports") == [{"port": port}] for each in rule["from"]]
        return peer in [each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in peers if "podSelector" in each]

    assert all(may_enter(component, "admin", "prometheus") for component in ("gateway", "scheduler", "worker"))
    assert may_enter("prometheus", "http", "grafana")
    assert not may_enter("grafana", "http", "grafana")
    out = of_kind(objects, "NetworkPolicy", "prometheus")["spec"]["egress"]
    reached = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for rule in out for peer in rule.get("to", [])}
    assert reached == {"gateway", "scheduler", "worker"}


def test_grafana_finds_prometheus_and_every_dashboard(objects: list[Object]) -> None:
    data = configuration(objects, "grafana")
    (source,) = yaml.safe_load(data["datasources.yaml"])["datasources"]
    service = of_kind(objects, "Service", "prometheus")
    assert source["url"] == f"http://{service['metadata']['name']}.models.svc.cluster.local:{service['spec']['ports'][0]['port']}"
    (trigger, _) = of_kind(objects, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["serverAddress"] == source["url"]
    spec = pod(objects, "grafana")["spec"]
    container = spec["containers"][0]
    (provider,) = yaml.safe_load(data["dashboards.yaml"])["providers"]
    (volume,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == provider["options"]["path"])
    (projected,) = (each["projected"]["sources"] for each in spec["volumes"] if each["name"] == volume)
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    files = {name for source in projected for name in maps[source["configMap"]["name"]]}
    assert files == dashboards(objects).keys()
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert Path(env["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).name in files
    assert env["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"  # there is no password to guess


def test_grafanas_password_stands_in_a_secret_only(helm: Helm) -> None:
    objects = helm.objects(merged(EVERYTHING, {"monitoring": {"stack": {"grafana": {"adminSecret": "admin"}}}}))
    env = pod(objects, "grafana")["spec"]["containers"][0]["env"]
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in env if "valueFrom" in each}
    assert secrets == {
        "GF_SECURITY_ADMIN_USER": {"name": "admin", "key": "user"},
        "GF_SECURITY_ADMIN_PASSWORD": {"name": "admin", "key": "password"},
    }


def test_a_change_of_rules_restarts_prometheus(helm: Helm, objects: list[Object]) -> None:
    changed = helm.objects(merged(EVERYTHING, ALLOWED, {"monitoring": {"slo": {"availability": 0.9}}}))
    assert pod(changed, "prometheus")["metadata"]["annotations"] != pod(objects, "prometheus")["metadata"]["annotations"]
    assert pod(changed, "grafana") == pod(objects, "grafana")
