"""Addresses of services, as they are listened at, written down and reached."""

LOOPBACK = "127.0.0.1"


def host_port(host: str, port: int) -> str:
    """As gRPC and URLs write it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def reachable(host: str) -> str:
    """Where this machine reaches what listens on `host`: at the loopback, where that is everywhere."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
