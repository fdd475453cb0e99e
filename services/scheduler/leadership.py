"""Who leads, of several schedulers of the same workers, and the epoch under which it speaks.

What keeps workers safe is the epoch: they refuse, and gateways ignore, a lower one than they have seen. The lease only says whose turn it
is, so a leader does not step down because it cannot renew it: it does when it sees that another one holds it.
"""

import asyncio
import logging
from typing import Protocol

from shared.errors import LockstepError, ProtocolError

logger = logging.getLogger(__name__)

# An honest peer is ahead by the takeovers that we have missed. These keep one that is not from raising ours to the end of its range;
# what gateways have raised ours to, a scheduler that begins anew can still take over from the workers.
MAX_RISE_BY_GATEWAY, MAX_RISE_BY_WORKER = 1 << 32, 1 << 48


class SteppedDown(LockstepError):
    """Another scheduler leads."""


class Lease(Protocol):
    """What one of several schedulers has, with an epoch that is higher each time."""

    async def acquire(self, address: str) -> int:
        """Waits until the holder is gone, and takes its place. Returns the epoch, written down before.

        address: `host:port` of our gRPC server, where others see that we live.
        """

    async def raise_epoch(self, epoch: int) -> None:
        """Writes down a higher epoch. Raises SteppedDown when somebody else has it now, LockstepError when that cannot be told."""

    async def hold(self) -> None:
        """Renews it until cancelled. Raises SteppedDown when somebody else has it."""

    async def release(self) -> None:
        """Gives it to whoever comes first."""


class NoLease:
    """There is one scheduler, and it leads."""

    async def acquire(self, address: str) -> int:
        return 1

    async def raise_epoch(self, epoch: int) -> None:
        pass

    async def hold(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        pass


class Leadership:
    """Takes an epoch above all that it is shown, if the lease is still ours."""

    def __init__(self, lease: Lease) -> None:
        self.epoch = 0  # until we lead
        self._lease = lease
        self._rising = asyncio.Lock()
        self._stream = 0  # the last one opened

    @property
    def leads(self) -> bool:
        return self.epoch > 0

    async def acquire(self, address: str) -> None:
        """Waits until we lead; see `Lease.acquire`."""
        self.epoch = await self._lease.acquire(address)
        logger.info("leading, with epoch %d", self.epoch)

    async def hold(self) -> None:
        """Until cancelled. Raises SteppedDown when another leads."""
        await self._lease.hold()

    async def release(self) -> None:
        if self.leads:
            await self._lease.release()

    async def next_stream(self, highest_epoch: int, highest_stream: int) -> tuple[int, int]:
        """(epoch, stream number) for a new Execute stream to a group that has seen these: strictly above them.

        Raises SteppedDown, or ProtocolError when they cannot be true.
        """
        ours = highest_epoch == self.epoch and self._stream > 0  # else it is one of the same number before us
        if highest_epoch > self.epoch or (highest_epoch == self.epoch and not ours) or highest_stream > self._stream + MAX_RISE_BY_WORKER:
            await self._rise(highest_epoch + 1, MAX_RISE_BY_WORKER, "a worker")
        self._stream = max(self._stream, highest_stream if highest_epoch == self.epoch else 0) + 1
        return self.epoch, self._stream

    async def shown(self, epoch: int) -> None:
        """A gateway has seen `epoch` of some scheduler: ours must not be below, or it ignores us. Raises as `next_stream`."""
        if epoch > self.epoch:
            await self._rise(epoch + 1, MAX_RISE_BY_GATEWAY, "a gateway")

    async def _rise(self, epoch: int, most: int, whose: str) -> None:
        if epoch > self.epoch + most:
            raise ProtocolError(f"{whose} has seen epoch {epoch - 1}, ours is {self.epoch}: that cannot be; restart it")
        async with self._rising:
            if epoch > self.epoch:
                await self._lease.raise_epoch(epoch)
                self.epoch = epoch
                logger.info("taking epoch %d: %s has seen the one before", epoch, whose)
