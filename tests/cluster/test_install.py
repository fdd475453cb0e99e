"""From nothing to an answer, under enforced "restricted" pod security and with network policies on."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import PARTS, Release

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed(release: Release) -> Iterator[Release]:
    release.deploy()
    yield release
    release.uninstall()


def answer(release: Release) -> str:
    with release.forwarded() as client:
        response = client.post("/v1/chat/completions", json={"model": "lockstep", "messages": QUESTION, "temperature": 0, "max_tokens": 16})
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


def test_an_installation_answers(installed: Release) -> None:
    assert "Paris" in answer(installed)


def test_pods_are_nobody_and_policies_are_there(installed: Release) -> None:
    pods = installed.objects("pods", PARTS)
    assert Counter(pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods) == {"gateway": 1, "scheduler": 2, "worker": 1}
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert all(status["restartCount"] == 0 for status in pod["status"]["containerStatuses"])
    assert len(installed.objects("networkpolicies")) == 3


def test_the_trials_pass(installed: Release) -> None:
    assert installed.trials() == 3


def test_upgrade_and_rollback(installed: Release) -> None:
    workers = installed.pods("worker")
    installed.deploy(gateway__replicas=2)
    assert len(installed.pods("gateway")) == 2
    assert installed.pods("worker") == workers
    assert "Paris" in answer(installed)
    installed.helm("rollback", installed.name, "--wait", "--timeout", "600s")
    assert len(installed.pods("gateway")) == 1
    assert "Paris" in answer(installed)
