"""Who leads: one at a time as far as anybody can tell, and with an epoch above all that went before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from services.scheduler.file_lease import FileLease
from services.scheduler.leadership import MAX_RISE_BY_GATEWAY, MAX_RISE_BY_WORKER, Leadership, NoLease, SteppedDown
from shared.errors import ConfigError, ProtocolError
from shared.ports import port_of, reserve
from shared.rpc import SERVER_OPTIONS, start_server

DURATION_S, RENEWAL_S = 0.2, 0.05
NOBODY, NOBODY_ELSE = "127.0.0.1:1", "127.0.0.1:2"  # that nobody listens at


def lease(folder: Path, duration_s: float = DURATION_S) -> FileLease:
    return FileLease(folder / "lease", duration_s, RENEWAL_S)


@contextlib.asynccontextmanager
async def alive(port: int = 0) -> AsyncIterator[str]:
    """The address of a service that answers, whatever it leads."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = await start_server(server, "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def waits(task: "asyncio.Task[int]", for_s: float = 3 * DURATION_S) -> bool:
    done, _ = await asyncio.wait((task,), timeout=for_s)
    return not done


async def test_the_first_leads_at_once_and_a_second_waits_while_it_renews(tmp_path: Path) -> None:
    duration_s = 0.8  # in which even a busy machine renews
    first, second = lease(tmp_path, duration_s), lease(tmp_path, duration_s)
    assert await first.acquire(NOBODY) == 1
    holding, waiting = asyncio.create_task(first.hold()), asyncio.create_task(second.acquire(NOBODY_ELSE))
    assert await waits(waiting, 1.5 * duration_s)
    holding.cancel()  # it is gone
    assert await asyncio.wait_for(waiting, 30) == 2


async def test_a_leader_that_cannot_renew_goes_on_while_it_answers(tmp_path: Path) -> None:
    first, second = lease(tmp_path), lease(tmp_path)
    with reserve("127.0.0.1") as reservation:  # so that nobody else answers there in the end
        async with alive(port_of(reservation)) as address:
            await first.acquire(address)
            waiting = asyncio.create_task(second.acquire(NOBODY_ELSE))
            assert await waits(waiting)
        assert await asyncio.wait_for(waiting, 30) == 2


async def test_a_lease_that_was_given_up_is_taken_without_a_wait(tmp_path: Path) -> None:
    async with alive() as address:
        first = lease(tmp_path)
        await first.acquire(address)
        await first.release()
        assert await asyncio.wait_for(lease(tmp_path).acquire(address), 30) == 2


async def test_a_leader_that_comes_back_at_its_address_does_not_wait_for_itself(tmp_path: Path) -> None:
    async with alive() as address:
        await lease(tmp_path).acquire(address)
        assert await asyncio.wait_for(lease(tmp_path).acquire(address), 30) == 2


async def test_an_old_leader_that_wakes_up_steps_down(tmp_path: Path) -> None:
    first, second = lease(tmp_path), lease(tmp_path)
    await first.acquire(NOBODY)
    await second.acquire(NOBODY_ELSE)
    with pytest.raises(SteppedDown, match="epoch 2; ours was 1"):
        await first.hold()
    with pytest.raises(SteppedDown):
        await first.raise_epoch(3)
    await second.raise_epoch(7)
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["7"]


async def test_of_many_that_wait_one_leads(tmp_path: Path) -> None:
    first = lease(tmp_path)
    await first.acquire(NOBODY)
    waiting = [asyncio.create_task(lease(tmp_path).acquire(f"127.0.0.1:{port}")) for port in range(2, 7)]
    await first.release()
    epochs = await asyncio.wait_for(asyncio.gather(*waiting), 30)  # none renews, so each has its turn
    assert sorted(epochs) == [2, 3, 4, 5, 6]


async def test_a_lease_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    first = lease(tmp_path)
    await first.acquire(NOBODY)
    await first.raise_epoch(5)
    (tmp_path / "lease" / "5").unlink()
    holding = asyncio.create_task(first.hold())
    async with asyncio.timeout(30):
        while not (tmp_path / "lease" / "5").exists():
            await asyncio.sleep(0.01)
    holding.cancel()


async def test_what_is_no_lease_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "3").write_text("not ours")
    with pytest.raises(ConfigError, match="a folder for it alone"):
        await lease(tmp_path).acquire(NOBODY)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder"):
        FileLease(tmp_path / "file", DURATION_S, RENEWAL_S)


async def test_epochs_rise_above_what_workers_and_gateways_have_seen(tmp_path: Path) -> None:
    leadership = Leadership(lease(tmp_path))
    await leadership.acquire(NOBODY)
    assert await leadership.next_stream(0, 0) == (1, 1)
    assert await leadership.next_stream(1, 1) == (1, 2)  # ours
    assert await leadership.next_stream(6, 9) == (7, 3)
    await leadership.shown(7)
    assert leadership.epoch == 7
    await leadership.shown(9)
    assert leadership.epoch == 10
    assert (tmp_path / "lease" / "10").exists()  # written down before it is used


async def test_an_epoch_of_the_same_number_before_us_is_not_ours() -> None:
    leadership = Leadership(NoLease())
    await leadership.acquire(NOBODY)
    assert await leadership.next_stream(1, 5) == (2, 1)


async def test_no_peer_can_raise_an_epoch_to_the_end_of_its_range() -> None:
    leadership = Leadership(NoLease())
    await leadership.acquire(NOBODY)
    for epoch in (1 + MAX_RISE_BY_GATEWAY, 2**64 - 1):
        with pytest.raises(ProtocolError, match="that cannot be"):
            await leadership.shown(epoch)
    for epoch in (1 + MAX_RISE_BY_WORKER, 2**64 - 1):
        with pytest.raises(ProtocolError, match="that cannot be"):
            await leadership.next_stream(epoch, 1)
    assert await leadership.next_stream(1, 2**64 - 1) == (2, 1)  # nor a stream's number
    await leadership.shown(MAX_RISE_BY_GATEWAY)
    anew = Leadership(NoLease())
    await anew.acquire(NOBODY)
    assert await anew.next_stream(leadership.epoch, 1) == (leadership.epoch + 1, 1)


async def test_who_has_lost_the_lease_rises_no_more(tmp_path: Path) -> None:
    leadership, other = Leadership(lease(tmp_path)), lease(tmp_path)
    await leadership.acquire(NOBODY)
    await other.acquire(NOBODY_ELSE)
    with pytest.raises(SteppedDown):
        await leadership.next_stream(2, 1)
    assert leadership.epoch == 1
