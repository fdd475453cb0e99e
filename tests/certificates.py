"""Certificates as cert-manager lays them into a folder."""

from pathlib import Path

import trustme


def write_certificates(folder: Path, authority: trustme.CA, name: str) -> Path:
    """tls.key, tls.crt and ca.crt of a new certificate for `name`; returns the folder, made if need be."""
    folder.mkdir(exist_ok=True)
    certificate = authority.issue_cert(name)
    (folder / "tls.key").write_bytes(certificate.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    (folder / "ca.crt").write_bytes(authority.cert_pem.bytes())
    return folder
