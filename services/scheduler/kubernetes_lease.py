"""A Lease object of the cluster, for schedulers in different pods.

Its annotations hold the epoch and the holder's address. Every write names the version that it was decided on, so of two that take over one
fails. Whoever waits counts from when it saw the last renewal, by its own clock, and asks the holder itself before it takes over.
"""

import asyncio
import datetime
import logging
import time
from pathlib import Path

from kubernetes.aio import client

from services.scheduler.heartbeat import answers
from services.scheduler.kubernetes_api import TIMEOUT_S, UNREACHABLE, in_words
from services.scheduler.leadership import SteppedDown
from shared.errors import PeerLost

logger = logging.getLogger(__name__)

EPOCH, ADDRESS = "lockstep/epoch", "lockstep/address"
CONFLICT, ABSENT = 409, 404


class KubernetesLease:
    """`duration_s`: a holder that has not renewed for so long is asked whether it lives; it renews every `renewal_s`."""

    def __init__(
        self, api: client.ApiClient, namespace: str, name: str, duration_s: float, renewal_s: float, tls: Path | None = None
    ) -> None:
        self._leases = client.CoordinationV1Api(api)
        self._namespace, self._name = namespace, name
        self._duration_s, self._renewal_s, self._tls = duration_s, renewal_s, tls
        self._address = ""
        self._epoch = self._asked = 0  # asked: the highest that we tried to write, whatever was answered
        self._told = ""

    async def acquire(self, address: str) -> int:
        self._address = address
        seen, since = "", time.monotonic()
        while True:
            try:
                lease = await self._read()
                version = _version(lease) or "absent"
                if version != seen:
                    seen, since = version, time.monotonic()
                holder = _annotation(lease, ADDRESS)
                if holder not in ("", address):
                    self._tell(f"waiting: the scheduler at {holder} leads")
                    gone = time.monotonic() - since > self._duration_s and not await answers(holder, self._tls)
                else:  # nobody, or one before us at our own address
                    gone = True
                if gone and await self._write(lease, _epoch(lease) + 1, address):
                    self._told = ""  # what we waited for is over, and no news for `hold`
                    return self._epoch
            except UNREACHABLE as error:
                self._tell("waiting for the API server", error)
            await asyncio.sleep(self._renewal_s / 4)

    async def raise_epoch(self, epoch: int) -> None:
        """Raises PeerLost, too, while the API server is away: who has the epoch before it may lead, and two would take turns at fencing."""
        try:
            while True:
                lease = await self._read()
                self._check(lease)
                if await self._write(lease, epoch, self._address):  # else a renewal of ours, or whoever leads now, came in between
                    return
        except UNREACHABLE as error:
            raise PeerLost(f"epoch {epoch} cannot be taken without the API server: {in_words(error)}") from error

    async def hold(self) -> None:
        while True:
            await asyncio.sleep(self._renewal_s)
            try:
                lease = await self._read()
                self._check(lease)
                await self._write(lease, self._epoch, self._address)
                self._tell("")
            except UNREACHABLE as error:  # no reason to step down: nobody else can have it
                self._tell("the lease cannot be renewed, we lead on", error)

    async def release(self) -> None:
        try:
            while True:
                lease = await self._read()
                if not self._is_ours(lease):
                    return
                if await self._write(lease, self._epoch, ""):  # else our last renewal arrived in between
                    return
        except UNREACHABLE as error:
            logger.warning("the lease cannot be given up, and will run out: %s", in_words(error))

    def _check(self, lease: client.V1Lease | None) -> None:
        """Raises SteppedDown when a higher epoch than ours is there, or ours in other hands."""
        if _epoch(lease) >= self._epoch and not self._is_ours(lease):
            holder = _annotation(lease, ADDRESS) or "(gone)"
            raise SteppedDown(f"the scheduler at {holder} leads now, with epoch {_epoch(lease)}; ours was {self._epoch}")

    def _is_ours(self, lease: client.V1Lease | None) -> bool:
        """Whether it was we who wrote it: perhaps just now, or with an answer that was lost."""
        return _annotation(lease, ADDRESS) == self._address and _epoch(lease) <= self._asked

    async def _read(self) -> client.V1Lease | None:
        """None when there is none yet."""
        try:
            return await self._leases.read_namespaced_lease(self._name, self._namespace, _request_timeout=TIMEOUT_S)
        except client.ApiException as error:
            if error.status == ABSENT:
                return None
            raise

    async def _write(self, before: client.V1Lease | None, epoch: int, address: str) -> bool:
        """Whether it was still as before, and is now as told, with an epoch that never falls. An empty address gives it up."""
        epoch = max(epoch, _epoch(before))
        self._asked = max(self._asked, epoch)
        now = datetime.datetime.now(datetime.UTC)
        annotations = {EPOCH: str(epoch), ADDRESS: address}
        metadata = client.V1ObjectMeta(name=self._name, annotations=annotations, resource_version=_version(before))
        last = before.spec if before is not None and before.spec is not None else client.V1LeaseSpec()
        taken = address != _annotation(before, ADDRESS)
        spec = client.V1LeaseSpec(
            holder_identity=address,
            lease_duration_seconds=max(1, round(self._duration_s)),
            renew_time=now,
            acquire_time=now if taken else last.acquire_time,
            lease_transitions=(last.lease_transitions or 0) + taken,
        )
        lease = client.V1Lease(api_version="coordination.k8s.io/v1", kind="Lease", metadata=metadata, spec=spec)
        try:
            if before is None:
                await self._leases.create_namespaced_lease(self._namespace, lease, _request_timeout=TIMEOUT_S)
            else:
                await self._leases.replace_namespaced_lease(self._name, self._namespace, lease, _request_timeout=TIMEOUT_S)
        except client.ApiException as error:
            if error.status == CONFLICT:
                return False
            raise
        self._epoch = max(self._epoch, epoch)  # it may have risen while we wrote
        return True

    def _tell(self, what: str, cause: BaseException | None = None) -> None:
        """Once, whatever causes follow the first: those of an API server that is away take turns."""
        if what != self._told:
            self._told = what
            logger.info("%s%s", what or "the lease is renewed again", f": {in_words(cause)}" if cause else "")


def _version(lease: client.V1Lease | None) -> str | None:
    return lease.metadata.resource_version if lease is not None and lease.metadata is not None else None


def _annotation(lease: client.V1Lease | None, key: str) -> str:
    metadata = lease.metadata if lease is not None else None
    return str(((metadata.annotations if metadata is not None else None) or {}).get(key, ""))


def _epoch(lease: client.V1Lease | None) -> int:
    """0 when nobody ever led. Somebody else's lease, or one that was edited, counts as none."""
    text = _annotation(lease, EPOCH)
    return int(text) if text.isdecimal() and len(text) < 20 else 0
