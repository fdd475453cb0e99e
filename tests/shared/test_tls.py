"""Mutual TLS over a real connection: who has no certificate of the authority is kept out, and renewed files are read."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared import rpc
from shared.errors import ConfigError
from shared.tls import server_credentials
from tests.certificates import write_certificates


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_folder(tmp_path: Path, authority: trustme.CA) -> Path:
    return write_certificates(tmp_path / "server", authority, "localhost")


@pytest.fixture
async def target(server_folder: Path) -> AsyncIterator[str]:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = await rpc.start_server(server, "localhost", 0, server_folder)
    yield f"localhost:{port}"
    await server.stop(None)


async def ask(target: str, tls: Path | None) -> str:
    """What the server answers: a status or the name of an error."""
    async with rpc.channel(target, tls) as opened:
        try:
            answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_a_peer_of_the_same_authority_is_let_in(target: str, tmp_path: Path, authority: trustme.CA) -> None:
    assert await ask(target, write_certificates(tmp_path / "client", authority, "localhost")) == "SERVING"


async def test_others_are_kept_out(target: str, tmp_path: Path, authority: trustme.CA) -> None:
    assert await ask(target, None) == "UNAVAILABLE"
    assert await ask(target, write_certificates(tmp_path / "stranger", trustme.CA(), "localhost")) == "UNAVAILABLE"
    mixed = write_certificates(tmp_path / "mixed", trustme.CA(), "localhost")  # trusts the server, and is trusted by nobody
    (mixed / "ca.crt").write_bytes(authority.cert_pem.bytes())
    assert await ask(target, mixed) == "UNAVAILABLE"


async def test_renewed_files_are_read(target: str, server_folder: Path, tmp_path: Path) -> None:
    renewed = trustme.CA()
    client = write_certificates(tmp_path / "client", renewed, "localhost")
    assert await ask(target, client) == "UNAVAILABLE"
    write_certificates(server_folder, renewed, "localhost")
    assert await ask(target, client) == "SERVING"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_folder: .*tls\.key"):
        server_credentials(tmp_path)
