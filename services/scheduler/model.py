"""What the groups serve: one model for all of them."""

from dataclasses import dataclass

from shared.protocol.files import ModelFile


@dataclass(frozen=True)
class Model:
    fingerprint: str
    vocab_size: int
    max_length: int  # tokens of prompt and completion together, of the group that allows most
    eos_ids: frozenset[int]
    files: tuple[ModelFile, ...]
