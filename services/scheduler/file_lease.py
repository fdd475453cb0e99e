"""A lease in a folder, for schedulers of one machine or of one shared file system.

The folder holds a file for each epoch; the highest is the holder's, who touches it to renew. To take over is to create the next one, which
works once: no lock that a stopped process could keep, and no clock that two processes would have to share. Whoever waits takes over when
the file has not changed for a while by its own clock and the holder does not answer either.
"""

import asyncio
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from services.scheduler.heartbeat import answers
from services.scheduler.leadership import SteppedDown
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BYTES = 4096  # of a file


@dataclass(frozen=True)
class _Holder:
    epoch: int
    address: str  # empty: it has given the lease up
    stamp: int  # changes with each renewal


class FileLease:
    """`duration_s`: a holder that has not renewed for so long is asked whether it lives; it renews every `renewal_s`."""

    def __init__(self, folder: Path, duration_s: float, renewal_s: float, tls: Path | None = None) -> None:
        """Raises ConfigError when there cannot be such a folder."""
        self._folder, self._duration_s, self._renewal_s, self._tls = folder, duration_s, renewal_s, tls
        self._epoch = 0
        self._address = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"leadership: no folder {folder} for the lease: {error.strerror}") from error

    async def acquire(self, address: str) -> int:
        self._address = address
        seen, since = None, 0.0
        while True:
            holder = self._holder()
            if holder is not None and holder != seen:
                if seen is None and holder.address not in ("", address):
                    logger.info("waiting: the scheduler at %s leads", holder.address)
                seen, since = holder, time.monotonic()
            if holder is None or holder.address in ("", address):  # nobody, or one before us at our own address
                gone = True
            else:
                gone = time.monotonic() - since > self._duration_s and not await answers(holder.address, self._tls)
            if gone and self._create(epoch := holder.epoch + 1 if holder else 1):
                return epoch
            await asyncio.sleep(self._renewal_s / 4)

    async def raise_epoch(self, epoch: int) -> None:
        self._check()
        if not self._create(epoch):
            raise SteppedDown(f"another scheduler has taken epoch {epoch}")

    async def hold(self) -> None:
        while True:
            await asyncio.sleep(self._renewal_s)
            try:
                self._check()
                if self._path(self._epoch).exists() or not self._create(self._epoch):
                    os.utime(self._path(self._epoch))
            except OSError as error:  # no reason to step down: nobody else has it
                logger.warning("the lease in %s cannot be renewed: %s", self._folder, error)

    async def release(self) -> None:
        try:
            self._write("").replace(self._path(self._epoch))
        except OSError as error:
            logger.warning("the lease in %s cannot be given up, and will run out: %s", self._folder, error)

    def _check(self) -> None:
        """Raises SteppedDown when a higher epoch than ours is there."""
        holder = self._holder()
        if holder is not None and holder.epoch > self._epoch:
            raise SteppedDown(f"the scheduler at {holder.address or '(gone)'} leads now, with epoch {holder.epoch}; ours was {self._epoch}")

    def _holder(self) -> _Holder | None:
        """Of the highest epoch; None when nobody ever was."""
        while True:
            epoch = max((int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()), default=0)
            if not epoch:
                return None
            try:
                with self._path(epoch).open("rb") as file:
                    content = json.loads(file.read(MAX_BYTES))
                    return _Holder(epoch, str(content["address"]), os.fstat(file.fileno()).st_mtime_ns)
            except FileNotFoundError:  # a higher one has come meanwhile
                continue
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"leadership: {self._path(epoch)} is not a lease of ours: give a folder for it alone") from error

    def _create(self, epoch: int) -> bool:
        """Makes this epoch ours, unless it is somebody's or a higher one is there."""
        temporary = self._write(self._address)
        path = self._path(epoch)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        holder = self._holder()
        if holder is None or holder.epoch > epoch:  # this one had been cleared away, since others went on
            path.unlink(missing_ok=True)
            return False
        self._epoch = epoch
        for other in self._folder.iterdir():
            if other.name.isdecimal() and int(other.name) < epoch:
                other.unlink(missing_ok=True)
        return True

    def _write(self, address: str) -> Path:
        temporary = self._folder / f".{secrets.token_hex(8)}"
        temporary.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        return temporary

    def _path(self, epoch: int) -> Path:
        return self._folder / str(epoch)
