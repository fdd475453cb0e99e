"""How addresses are written, and where they lead."""

import pytest

from shared.addresses import host_port, reachable


@pytest.mark.parametrize("host, written", [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("a.b", "a.b:80")])
def test_ipv6_is_written_in_brackets(host: str, written: str) -> None:
    assert host_port(host, 80) == written


@pytest.mark.parametrize("host, at", [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.1", "10.0.0.1")])
def test_what_listens_everywhere_is_reached_at_the_loopback(host: str, at: str) -> None:
    assert reachable(host) == at
