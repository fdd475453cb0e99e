"""The worker's admin port, over a real process: start-up, steps, refused plans, readiness."""

from pathlib import Path

import httpx
import pytest

from benchmarks.driver import admission, int32s
from services.worker.metrics import WorkerMetrics
from shared.metrics import new_registry
from shared.protocol.plan import Plan
from shared.rpc import StreamEnded
from tests.exposition import OPENMETRICS, samples
from tests.services.worker.client import execution, worker
from tests.tiny import weightless_model

SCRIPTED = ("--engine", "scripted", "--page-size", "4", "--max-num-seqs", "4", "--num-pages", "50", "--group", "blue")


async def scrape(client: httpx.AsyncClient, accept: str = "text/plain") -> dict[str, float]:
    return samples(await client.get("/metrics", headers={"Accept": accept}))


def plan(plan_id: int, slot: int) -> Plan:
    return Plan(
        plan_id,
        prefill_slots=int32s(slot),
        prefill_starts=int32s(0),
        prefill_lengths=int32s(3),
        prefill_flags=int32s(1),
        prefill_ids=int32s(5, 6, 7),
        admissions=admission(slot, 200, epoch=1),
    )


async def test_steps_and_refused_plans_are_counted_and_start_up_is_told(tmp_path: Path) -> None:
    with worker(tmp_path, "--model", str(weightless_model(tmp_path / "model")), "--tensor-parallel-size", "2", *SCRIPTED) as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False, verify=False) as client:
            before = await scrape(client)
            async with execution(running.port, stream=1, group="blue") as stream:
                stream.send(plan(1, 0))
                for plan_id in (2, 3):
                    stream.send(Plan(plan_id, iterations=2, decode_slots=int32s(0), decode_flags=int32s(1)))
                for _ in range(3):
                    await stream.result()
                stream.send(plan(4, 99))
                with pytest.raises(StreamEnded):
                    await stream.result()
            after = await scrape(client)
            assert after.keys() == (await scrape(client, OPENMETRICS)).keys()
            assert (await client.get("/livez")).status_code == (await client.get("/readyz")).status_code == 200
    changed = {name: value - before[name] for name, value in after.items() if name.startswith("lockstep_") and value != before[name]}
    busy, idle = (changed.pop(f"lockstep_worker_{name}_seconds_total{{engine=blue}}") for name in ("busy", "idle"))
    assert 0 < busy < 10
    assert 0 < idle < 60
    assert changed["lockstep_worker_plans_total{engine=blue}"] == 3
    assert changed["lockstep_worker_plans_refused_total{engine=blue}"] == 1
    assert changed["lockstep_worker_streams_total{engine=blue}"] == 1
    assert changed["lockstep_worker_step_seconds_count{engine=blue,kind=prefill}"] == 1
    assert changed["lockstep_worker_step_seconds_count{engine=blue,kind=decode}"] == 4
    assert changed["lockstep_worker_launch_seconds_count{engine=blue,kind=decode}"] == 4
    assert 0 < changed["lockstep_worker_launch_seconds_sum{engine=blue,kind=prefill}"] <= busy
    assert after["lockstep_worker_ready{engine=blue}"] == after["lockstep_worker_startup_progress_ratio{engine=blue}"] == 1
    assert after["lockstep_worker_startup_seconds{engine=blue,phase=starting ranks}"] > 0
    assert all(after[f"lockstep_worker_rank_resident_memory_bytes{{engine=blue,rank={rank}}}"] > 1e6 for rank in (0, 1))


async def test_mod_06_it_lives_but_is_not_ready_while_it_loads(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"load_s": 3600}')
    model = weightless_model(tmp_path / "model")
    with worker(tmp_path, "--model", str(model), "--script", str(script), *SCRIPTED) as running:
        await running.loading("loading weights")
        async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False, verify=False) as client:
            assert (await client.get("/livez")).status_code == 200
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.text) == (503, "loading weights: 50%\n")
            values = await scrape(client)
    assert values["lockstep_worker_ready{engine=blue}"] == 0
    assert values["lockstep_worker_startup_progress_ratio{engine=blue}"] == 0.5
    assert values["lockstep_worker_startup_seconds{engine=blue,phase=loading weights}"] > 0


def test_every_series_is_there_from_the_start() -> None:
    registry = new_registry("worker")
    WorkerMetrics(registry).group("blue", 1).watch(lambda: False, lambda: 0, dict)
    counted = ("plans_total", "plans_refused_total", "busy_seconds_total", "idle_seconds_total")
    for name in (*counted, "ready", "queued_plans", "borrowed_shapes"):
        assert registry.get_sample_value(f"lockstep_worker_{name}", {"engine": "blue"}) == 0
    for kind in ("decode", "prefill"):
        assert registry.get_sample_value("lockstep_worker_step_seconds_count", {"engine": "blue", "kind": kind}) == 0
