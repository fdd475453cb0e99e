"""A real Prometheus scrapes all three services."""

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually
from tests.tiny import weightless_model

CONFIG = """
global:
  scrape_interval: 500ms
scrape_configs:
  - job_name: lockstep
    static_configs:
{targets}
"""
TARGET = "      - {{targets: ['127.0.0.1:{port}'], labels: {{service: {name}}}}}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = weightless_model(tmp_path_factory.mktemp("models") / "tiny")
    with Stack(tmp_path_factory.mktemp("stack"), model=model, engine="scripted") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, debian: Callable[..., None], stack: Stack) -> Iterator[httpx.Client]:
    """A client of its API."""
    debian("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    services = (stack.gateway, stack.scheduler, stack.worker)
    targets = "\n".join(TARGET.format(port=service.ports["admin"], name=service.name) for service in services)
    (folder / "prometheus.yml").write_text(CONFIG.format(targets=targets))
    program, promtool = shutil.which("prometheus"), shutil.which("promtool")
    assert program is not None
    assert promtool is not None
    subprocess.run([promtool, "check", "config", folder / "prometheus.yml"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, *arguments], stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as client:
            eventually(lambda: is_up(client), 30)
            yield client
    finally:
        process.terminate()
        process.wait(10)
        print((folder / "log").read_text())


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/query", params={"query": "up"}).is_success
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> dict[str, float]:
    """Values by service."""
    answer = client.get("/query", params={"query": expression}).raise_for_status().json()
    return {sample["metric"]["service"]: float(sample["value"][1]) for sample in answer["data"]["result"]}


def test_all_three_are_scraped(prometheus: httpx.Client, stack: Stack) -> None:
    eventually(lambda: query(prometheus, "up == 1").keys() == {"gateway", "scheduler", "worker"}, 20)
    targets = prometheus.get("/targets").json()["data"]["activeTargets"]
    assert [target["lastError"] for target in targets] == ["", "", ""], json.dumps(targets)


def test_what_a_request_does_is_seen(prometheus: httpx.Client, stack: Stack) -> None:
    stack.complete("hi", max_tokens=5)
    completions = "lockstep_gateway_requests_total{code='200',endpoint='/v1/completions'}"
    eventually(lambda: query(prometheus, "sum by (service) (lockstep_request_success_total)") == {"scheduler": 1.0}, 20)
    eventually(lambda: query(prometheus, f"sum by (service) ({completions})") == {"gateway": 1.0}, 20)
    eventually(lambda: query(prometheus, "sum by (service) (lockstep_worker_plans_total) > 0").keys() == {"worker"}, 20)
