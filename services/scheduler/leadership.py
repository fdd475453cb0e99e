"""The epoch under which this scheduler speaks; workers and gateways refuse or ignore a lower one than they have seen."""

import logging

logger = logging.getLogger(__name__)


class Leadership:
    """Takes an epoch above all that it is shown. With a standby, whether it may do so will be decided here."""

    def __init__(self) -> None:
        self.epoch = 1
        self._stream = 0

    def next_stream(self, highest_epoch: int, highest_stream: int) -> tuple[int, int]:
        """(epoch, stream number) for a new Execute stream to a group that has seen these: strictly above them."""
        if highest_epoch > self.epoch:
            self.epoch = highest_epoch + 1
            logger.info("taking epoch %d: a worker has seen %d", self.epoch, highest_epoch)
        self._stream = max(self._stream, highest_stream if highest_epoch == self.epoch else 0) + 1
        return self.epoch, self._stream

    def shown(self, epoch: int) -> None:
        """A gateway has seen `epoch` of some scheduler: ours must not be below, or it ignores us."""
        if epoch > self.epoch:
            self.epoch = epoch
            logger.info("taking epoch %d: a gateway has seen it", epoch)
