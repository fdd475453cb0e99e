"""The whole stack over mutual TLS, and a stranger at each gRPC port."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import write_certificates
from tests.e2e.stack import Stack


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return write_certificates(tmp_path / "tls", trustme.CA(), "127.0.0.1")


def test_services_talk_over_mutual_tls(start_stack: Callable[..., Stack], weightless_model: Path, certificates: Path) -> None:
    flag = [f"--tls-folder={certificates}"]
    stack = start_stack(
        model=weightless_model,
        engine="scripted",
        script={"default": {"ids": [40, 41, 42]}},
        worker_args=flag,
        scheduler_args=flag,
        gateway_args=flag,
    )
    answer = stack.client.post("/v1/completions", json={"model": stack.names[0], "prompt": [5, 6], "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    for service in (stack.worker, stack.scheduler):
        with grpc.insecure_channel(service.address) as stranger, pytest.raises(grpc.RpcError) as refused:
            health_pb2_grpc.HealthStub(stranger).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
