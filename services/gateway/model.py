"""The model that the scheduler serves: its limits, and its tokenizer from files that the scheduler hands on."""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from services.gateway.text.tokenizer import TextTokenizer
from shared import rpc
from shared.errors import ConfigError, ProtocolError
from shared.protocol import files
from shared.protocol.files import ModelFile
from shared.protocol.generation_pb2 import GenerationDescribeRequest, GenerationDescribeResponse, GenerationFilesRequest
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.protocol.plan import MAX_REPETITION

logger = logging.getLogger(__name__)

FILES_TIMEOUT_S = 60.0
MANIFEST = "manifest.json"  # of a cached folder: file names to SHA-256
GENERATION_CONFIG = "generation_config.json"
MAX_CACHED = 8  # folders, one for each model


class SamplingDefaults(BaseModel):
    """The fields of generation_config.json that requests have too."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 are off, as in a request
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1 / MAX_REPETITION, le=MAX_REPETITION)


@dataclass(frozen=True)
class Model:
    fingerprint: str
    vocab_size: int  # ids at or above it are refused
    max_length: int  # tokens of prompt and completion together
    eos_ids: frozenset[int]
    tokenizer: TextTokenizer
    sampling_defaults: Mapping[str, float]  # of what a request leaves out, by field; else the API's own


async def describe(stub: GenerationStub) -> GenerationDescribeResponse:
    """What the scheduler serves. Raises ProtocolError when it speaks another protocol; AioRpcError (unavailable) until a group is ready."""
    answer = await stub.Describe(GenerationDescribeRequest(protocol_version=rpc.PROTOCOL_VERSION), timeout=rpc.CONNECT_S)
    rpc.check_version(answer.protocol_version, "the scheduler")
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,128}", answer.fingerprint) or not answer.vocab_size or not answer.max_length:
        raise ProtocolError("the scheduler describes its model without a fingerprint, a vocabulary size or a length")
    return answer


async def load(stub: GenerationStub, description: GenerationDescribeResponse, *, apply_generation_config: bool) -> Model:
    """The described model, its files from the cache or else from the scheduler."""
    folder = await asyncio.to_thread(_cached, description.fingerprint)
    if folder is None:
        request = GenerationFilesRequest(fingerprint=description.fingerprint)
        received = await files.receive(aiter(stub.Files(request, timeout=FILES_TIMEOUT_S)))
        folder = await asyncio.to_thread(_store, description.fingerprint, received)
    tokenizer = await asyncio.to_thread(TextTokenizer, folder, description.max_length)
    if tokenizer.chat_template is None:
        logger.warning("the model has no chat template: /v1/chat/completions will refuse every request")
    suggested = await asyncio.to_thread(_sampling_defaults, folder)
    if suggested:
        found = ", ".join(f"{name}={value}" for name, value in suggested.items())
        logger.info(
            "generation_config.json: %s, %s", found, "which are defaults now" if apply_generation_config else "which are not applied"
        )
    logger.info("serving model %s with a context of %d tokens", description.fingerprint[:12], description.max_length)
    return Model(
        description.fingerprint,
        description.vocab_size,
        description.max_length,
        frozenset(description.eos_ids),
        tokenizer,
        suggested if apply_generation_config else {},
    )


def cache_folder() -> Path:
    """Where model files are kept between starts: a folder for each fingerprint."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lockstep" / "files"


def _sampling_defaults(folder: Path) -> dict[str, float]:
    """What the model's authors suggest. Raises ConfigError for a file that cannot be read or a value that no request may have."""
    try:
        config = json.loads((folder / GENERATION_CONFIG).read_text())
        return SamplingDefaults.model_validate(config).model_dump(exclude_none=True)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"the model's {GENERATION_CONFIG} is not usable: {error}") from error


def _cached(fingerprint: str) -> Path | None:
    """The folder of these files, if it is there and undamaged."""
    folder = cache_folder() / fingerprint
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        intact = all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256 for name, sha256 in manifest.items())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cached model files in %s cannot be read: %s", folder, error)
        return None
    return folder if intact else None


def _store(fingerprint: str, received: list[ModelFile]) -> Path:
    """Writes the files in one step: a reader sees the whole folder or none. Without a usable cache: in a folder of this process's own."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
    except OSError as error:
        logger.warning("no cache of model files in %s: %s", cache, error)
        return _write(Path(tempfile.mkdtemp(prefix="lockstep-files-")), received)
    _write(temporary, received)
    folder = cache / fingerprint
    shutil.rmtree(folder, ignore_errors=True)  # damaged, else we would not be here
    try:
        temporary.rename(folder)
    except OSError:  # another gateway was faster
        shutil.rmtree(temporary)
    _prune(cache, folder)
    return folder


def _write(folder: Path, received: list[ModelFile]) -> Path:
    for file in received:
        (folder / file.name).write_bytes(file.data)
    (folder / MANIFEST).write_text(json.dumps({file.name: file.sha256 for file in received}))
    return folder


def _prune(cache: Path, kept: Path) -> None:
    others = sorted((each for each in cache.iterdir() if each != kept), key=lambda each: each.stat().st_mtime, reverse=True)
    for folder in others[MAX_CACHED - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)
