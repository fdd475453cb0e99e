"""Mutual TLS between services, from a folder as cert-manager fills it: tls.crt, tls.key, ca.crt.

Renewed files are read anew: by a server at the next handshake, by a client when it connects again. Names are checked: a
certificate must name the host by which its service is called.
"""

from pathlib import Path

import grpc

from shared.errors import ConfigError


def _read(folder: Path) -> tuple[bytes, bytes, bytes]:
    """Key, certificate chain, authorities. Raises ConfigError naming the file that is missing."""
    try:
        key, chain, authorities = ((folder / name).read_bytes() for name in ("tls.key", "tls.crt", "ca.crt"))
    except OSError as error:
        raise ConfigError(f"tls_folder: {error.filename} cannot be read: {error.strerror}") from error
    return key, chain, authorities


def channel_credentials(folder: Path) -> grpc.ChannelCredentials:
    """Of a client. Raises ConfigError when a file is missing."""
    key, chain, authorities = _read(folder)
    return grpc.ssl_channel_credentials(authorities, key, chain)


def server_credentials(folder: Path) -> grpc.ServerCredentials:
    """Of a server that lets in only who has a certificate of the same authority. Raises ConfigError when a file is missing."""
    last = _read(folder)

    def configuration(key: bytes, chain: bytes, authorities: bytes) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        try:
            current = _read(folder)
        except ConfigError:  # between two links of a volume that is being renewed: the last ones still hold
            return None
        if current == last:
            return None
        last = current
        return configuration(*current)

    return grpc.dynamic_ssl_server_credentials(configuration(*last), renewed, require_client_authentication=True)  # type: ignore[arg-type]
