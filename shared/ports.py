"""Ports that stay ours while nobody listens there."""

import socket


def reserve(host: str, port: int = 0) -> socket.socket:
    """A socket that is bound and does not listen: until it is closed the kernel gives its port to nobody who asks for any.

    Servers may listen there, one after another or sharing the port, if they set SO_REUSEADDR, as ours do. port: 0 lets the kernel
    pick, `port_of` tells. Raises OSError when the port cannot be had: somebody listens there, or the host is none of ours.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, port))
    except OSError:
        reservation.close()
        raise
    return reservation


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])
