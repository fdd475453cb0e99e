import errno
import os
import socket

import grpc
import pytest

from shared.errors import LockstepError
from shared.ports import port_of, reserve
from shared.rpc import SERVER_OPTIONS, start_server

IN_USE = os.strerror(errno.EADDRINUSE)


def test_a_reserved_port_is_for_one_server_after_another() -> None:
    with reserve("127.0.0.1") as reservation:
        port = port_of(reservation)
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match=IN_USE):
                reserve("127.0.0.1", port)
        with socket.socket() as stranger, pytest.raises(OSError, match=IN_USE):
            stranger.bind(("127.0.0.1", port))  # as the end of an outgoing connection would be


def test_several_processes_may_share_a_reserved_port() -> None:
    with reserve("::1") as reservation:
        address = ("::1", port_of(reservation))
        with (
            socket.create_server(address, family=socket.AF_INET6, reuse_port=True),
            socket.create_server(address, family=socket.AF_INET6, reuse_port=True),
        ):
            pass


async def test_grpc_listens_on_a_reserved_port_again_and_again() -> None:
    with reserve("127.0.0.1") as reservation:
        for _ in range(2):
            server = grpc.aio.server(options=SERVER_OPTIONS)
            assert await start_server(server, "127.0.0.1", port_of(reservation)) == port_of(reservation)
            with pytest.raises(LockstepError, match="cannot listen"):
                await start_server(grpc.aio.server(options=SERVER_OPTIONS), "127.0.0.1", port_of(reservation))
            await server.stop(None)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(socket.gaierror):
        reserve("no.host.invalid", 80)
