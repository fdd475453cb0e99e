"""A pod that asks the gateway from within the cluster: its streams outlive other pods, as those of a port-forward do not."""

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.cluster.conftest import Object, Release, run

SCRIPT = Path(__file__).with_name("streams.py")
STREAMS, TOKENS = 8, 80
NAME = "client"
POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": NAME},
    "spec": {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": NAME,
                "command": ["python3", "-c", "import time\nwhile True: time.sleep(60)"],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "temporary", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "temporary", "emptyDir": {}}],
    },
}


@dataclass
class Running:
    """Streams; `result` is there once they have ended."""

    result: Object = field(default_factory=dict)

    @property
    def texts(self) -> list[list[str]]:
        assert self.result["errors"] == [], self.result
        texts: list[list[str]] = self.result["texts"]
        return texts


class Client:
    """Of a release. It stands on a node that must not be drained while it does."""

    def __init__(self, release: Release) -> None:
        self._release = release
        pod = json.loads(json.dumps(POD))
        (container,) = pod["spec"]["containers"]
        container |= {"image": release.image("gateway"), "imagePullPolicy": release.images["pullPolicy"]}
        run("kubectl", "--namespace", release.namespace, "apply", "--filename", "-", stdin=json.dumps(pod))
        release.kubectl("wait", f"pod/{NAME}", "--for=condition=Ready", "--timeout=120s", timeout=150)

    @property
    def node(self) -> str:
        return self._release.kubectl("get", "pod", NAME, "--output", "jsonpath={.spec.nodeName}")

    def delete(self) -> None:
        self._release.kubectl("delete", "pod", NAME, "--wait=false")

    @contextmanager
    def streams(self, *, once: bool = False) -> Iterator[Running]:
        """Streams that run all the while inside, each anew when it has ended, or once; all have begun."""
        until = "once" if once else f"/tmp/{uuid.uuid4().hex}"
        arguments = ["lockstep-gateway", "80", "lockstep", str(STREAMS), str(TOKENS), until]
        command = ["kubectl", "--namespace", self._release.namespace, "exec", NAME, "--", "python3", "-c", SCRIPT.read_text(), *arguments]
        running = Running()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                assert process.stdout.readline().strip() == "begun", process.stderr.read()
                try:
                    yield running
                finally:
                    if not once:
                        self._release.kubectl("exec", NAME, "--", "touch", until)
                running.result = _last(process.stdout, process.stderr)
            finally:
                process.kill()

    def once(self) -> list[str]:
        """What each stream says when nothing happens to it."""
        with self.streams(once=True) as running:
            pass
        return [text for (text,) in running.texts]


def _last(output: IO[str], errors: IO[str]) -> Any:
    """What the script prints at its end, which its own time limits bring about."""
    line = output.readline()
    assert line, f"the client ended without a word: {errors.read()}"
    return json.loads(line)
