"""API keys: a JSON file of their SHA-256 digests, what each key may use, and how one is made.

    {"keys": [{"name": "alice", "sha256": "9f86...", "tenant": "team-a", "requests_per_minute": 60}]}

Keys are 256 random bits, so a plain digest gives nothing away. The file is read again when it changes.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_KEYS = 1024  # each request is compared with all of them, in about 0.2 us a key
MAX_KEY_BYTES = 512
MAX_FILE_BYTES = 1 << 20
RELOAD_S = 1.0
PREFIX = "sk-"

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z._-]+$")]
Limit = Annotated[int, Field(ge=1, le=10**12)]


class ApiKey(BaseModel):
    """One key, as the file has it. A limit that is absent is none."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Name = Field(description="Told in logs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Of the key's bytes, in lower-case hex.")
    tenant: Name | None = Field(default=None, description="Whose it is; by default the key's name. Tenants share neither cache nor turn.")
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = Field(default=None, description="Of prompts and completions, counted when a request has ended.")
    concurrent_requests: Limit | None = None

    @property
    def owner(self) -> str:
        """The tenant."""
        return self.tenant or self.name

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


class KeyFile(BaseModel):
    """The file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    keys: list[ApiKey] = Field(min_length=1, max_length=MAX_KEYS)

    @model_validator(mode="after")
    def names_and_digests_are_unique(self) -> "KeyFile":
        for values in ([key.name for key in self.keys], [key.sha256 for key in self.keys]):
            if twice := next((value for value in values if values.count(value) > 1), None):
                raise ValueError(f"{twice} stands there twice")
        return self


def digest_of(key: bytes) -> str:
    """As the file has it."""
    return hashlib.sha256(key).hexdigest()


def read(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises ConfigError, telling what is wrong and no more of the content than its place."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_keys: {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"api_keys: {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        keys = KeyFile.model_validate_json(content).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"api_keys: {path}: {place + ': ' if place else ''}{first['msg']}") from None
    if any(hmac.compare_digest(key.sha256, digest_of(b"")) for key in keys):
        raise ConfigError(f"api_keys: {path} has the digest of an empty key")
    return keys


class KeyRing:
    """The keys that are good now."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._path = path
        self._version = _version(path)
        self.keys: Sequence[ApiKey] = read(path)

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that somebody shows, if it is one of ours. Takes the same time for all."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    async def follow(self) -> None:
        """Reads the file again whenever it has changed, until cancelled. What cannot be used changes nothing, and is told."""
        while True:
            await asyncio.sleep(RELOAD_S)
            version = await asyncio.to_thread(_version, self._path)
            if version == self._version:
                continue
            self._version = version
            try:
                self.keys = await asyncio.to_thread(read, self._path)
            except ConfigError as error:
                logger.error("%s; the keys of before stay good", error)
            else:
                logger.info("api_keys: %d keys are good now", len(self.keys))


def _version(path: Path) -> tuple[int, ...] | None:
    """Changes with the file, also when a Kubernetes Secret exchanges it behind a link; None while there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def add(
    path: Path,
    name: str,
    tenant: str | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    concurrent_requests: int | None = None,
) -> str:
    """Makes a key and adds its digest to the file, which is made if need be; returns the key, which stands nowhere else.

    Raises ConfigError when the file or what is asked for cannot be used.
    """
    keys = [key.model_dump(exclude_none=True) for key in read(path)] if path.exists() else []
    secret = PREFIX + secrets.token_urlsafe(32)
    entry = {
        "name": name,
        "sha256": digest_of(secret.encode()),
        "tenant": tenant,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    keys.append({field: value for field, value in entry.items() if value is not None})
    try:
        KeyFile.model_validate({"keys": keys})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ConfigError(f"{first['loc'][-1] if first['loc'] else name}: {first['msg']}") from None
    new = path.with_name(f"{path.name}.new-{os.getpid()}")
    new.touch(mode=0o600, exist_ok=False)
    new.write_text(json.dumps({"keys": keys}, indent=2) + "\n")
    new.replace(path)  # in one step: a reader sees the whole file
    return secret
