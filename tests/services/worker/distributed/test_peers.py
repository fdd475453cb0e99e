"""Whose failure is told when several ranks fail for one reason."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.worker import supervisor as module
from services.worker.messages import Failed
from services.worker.metrics import WorkerMetrics
from services.worker.ranks import GroupFailed
from services.worker.settings import WorkerSettings
from services.worker.supervisor import Supervisor
from shared.settings import load


class Told(Supervisor):
    """A supervisor that is told what ranks would say."""

    def tell(self, rank: int, cause: str, peer: bool) -> None:
        self._on_message(rank, Failed(cause, config=False, peer=peer))


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Told]:
    settings = load(WorkerSettings, "worker", ["--model", str(tmp_path), "--tensor-parallel-size", "3"])
    told = Told(settings, WorkerMetrics(CollectorRegistry()).group("group-0", 3))
    yield told
    told.stop()


async def test_a_broken_collective_waits_for_the_rank_that_broke_it(supervisor: Told) -> None:
    supervisor.tell(0, "all_reduce failed", peer=True)
    supervisor.tell(1, "all_reduce failed", peer=True)
    await asyncio.sleep(0)
    assert not supervisor.failed.done()
    supervisor.tell(2, "out of memory", peer=False)
    with pytest.raises(GroupFailed, match=r"^rank 2: out of memory$"):
        await supervisor.failed


async def test_a_broken_collective_is_the_cause_when_no_rank_tells_another(supervisor: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CULPRIT_S", 0.01)
    supervisor.tell(0, "all_reduce failed: timed out", peer=True)
    with pytest.raises(GroupFailed, match=r"^rank 0: all_reduce failed: timed out$"):
        await asyncio.wait_for(supervisor.failed, 30)
