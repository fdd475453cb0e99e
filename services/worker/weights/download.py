"""`python -m services.worker.weights.download REPOSITORY REVISION FOLDER`: what a worker needs of a hub's repository, into a folder.

Only the configuration, the tokenizer and the safetensors files: a checkpoint in other formats beside them stays where it is.
A download that was broken off goes on where it stopped. HF_TOKEN and HF_ENDPOINT are huggingface_hub's own.
"""

import argparse
import logging
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from shared.command import exit_status
from shared.errors import LockstepError

FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
UNWANTED = ("consolidated*.safetensors", "*/*")  # a second copy of the weights, and folders of other formats

logger = logging.getLogger(__name__)


class DownloadError(LockstepError):
    """The repository could not be had."""


def download(repository: str, revision: str, folder: Path) -> None:
    """Shows bars on stderr. Raises DownloadError with the hub's reason."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=list(FILES), ignore_patterns=list(UNWANTED))
    except Exception as error:  # the hub's, its storage's, and whatever its HTTP client raises when a connection breaks: nothing in common
        reason = " ".join(str(error).split()) or type(error).__name__
        question = "is the name right, does HF_TOKEN allow it, is the hub within reach?"
        raise DownloadError(f"{repository} at {revision}: {reason}: {question}") from error
    if not (folder / "config.json").exists():
        raise DownloadError(f"{repository} at {revision} has no config.json: it is no model that can be served")


def main() -> int:
    parser = argparse.ArgumentParser("lockstep-download", description="Downloads a model folder.")
    parser.add_argument("repository")
    parser.add_argument("revision")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    return exit_status(parser.prog, lambda: download(given.repository, given.revision, given.folder))


if __name__ == "__main__":
    sys.exit(main())
