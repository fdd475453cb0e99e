"""Several processes behind one port: real ones, under one scripted scheduler."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from services.gateway import keys
from services.gateway.merged_metrics import MergedRegistry, merged
from services.gateway.metrics import GatewayMetrics
from tests.processes import Family
from tests.services.gateway.conftest import EOS
from tests.services.gateway.scripted_scheduler import Script, ScriptedScheduler

WITHIN_S = 60.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Gateway:
    """`python -m services.gateway --processes 2`, its scheduler, and what they say."""

    def __init__(self, folder: Path, scheduler: ScriptedScheduler) -> None:
        self.scheduler, self.log, self._ports_file = scheduler, folder / "log", folder / "ports"
        self.family = Family()
        self.folder = folder

    async def start(self, *arguments: str) -> None:
        command = [
            sys.executable,
            "-m",
            "services.gateway",
            "--port",
            "0",
            "--admin-port",
            "0",
            "--processes",
            "2",
            "--parent-pid",
            str(os.getpid()),
        ]
        command += ["--ports-file", str(self._ports_file), "--scheduler", f"127.0.0.1:{self.scheduler.port}", "--served-model-name", "tiny"]
        with self.log.open("w") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, *arguments, stdout=log, stderr=log, env={**self.family.environment, "XDG_CACHE_HOME": str(self.folder)}
            )
        async with asyncio.timeout(WITHIN_S):
            while not self._ports_file.exists() and self.process.returncode is None:
                await asyncio.sleep(0.02)
        assert self.process.returncode is None, self.log.read_text()
        ports = json.loads(self._ports_file.read_text())
        self.url, self.admin = (f"http://127.0.0.1:{ports[name]}" for name in ("http", "admin"))
        await self.until(lambda: len(scheduler_names(self.scheduler)) >= 2)

    async def says_yes(self, url: str) -> bool:
        """Over a connection of its own."""
        async with httpx.AsyncClient(timeout=WITHIN_S, verify=False) as client:
            return (await client.get(url)).is_success

    async def ready(self) -> bool:
        return await self.says_yes(f"{self.admin}/readyz")

    async def until_ready(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not await self.ready():
                await asyncio.sleep(0.02)

    async def until(self, fact: Any) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not fact():
                await asyncio.sleep(0.02)

    def children(self) -> list[psutil.Process]:
        """Those that serve: not the tracker of multiprocessing."""
        return [child for child in psutil.Process(self.process.pid).children() if "spawn_main" in " ".join(child.cmdline())]

    async def chat(self, key: str = "", **body: Any) -> httpx.Response:
        """Over a connection of its own, so that the kernel picks a process."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=WITHIN_S, verify=False) as client:
            return await client.post(f"{self.url}/v1/chat/completions", json={**CHAT, **body}, headers=headers)

    async def at_rest(self) -> dict[str, float]:
        """The metrics once no request is in work: a client may have its answer a moment before it is counted."""
        async with asyncio.timeout(WITHIN_S):
            while (totals := await self.metrics())["lockstep_gateway_inflight_requests"]:
                await asyncio.sleep(0.02)
        return totals

    async def metrics(self) -> dict[str, float]:
        """Sums over labels."""
        async with httpx.AsyncClient(timeout=WITHIN_S, verify=False) as client:
            answer = (await client.get(f"{self.admin}/metrics")).raise_for_status()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


def scheduler_names(scheduler: ScriptedScheduler) -> set[str]:
    return {hello.gateway for hello in scheduler.hellos}


@pytest.fixture
async def gateway(tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[Gateway]:
    scheduler = ScriptedScheduler(folder=tokenizer_folder)
    await scheduler.start()
    gateway = Gateway(tmp_path, scheduler)
    try:
        yield gateway
        if gateway.process.returncode is None:
            gateway.process.terminate()
        assert await asyncio.wait_for(gateway.process.wait(), WITHIN_S) == 0
        gateway.family.end()  # what the killed process had started itself notices when it has loaded its libraries
    finally:
        if gateway.process.returncode is None:
            gateway.process.kill()
        await scheduler.close()
        print(gateway.log.read_text())


async def test_processes_share_the_port_the_limits_and_one_view_of_metrics(gateway: Gateway) -> None:
    key_file = gateway.folder / "keys.json"
    key = keys.add(key_file, "a", concurrent_requests=6)
    gateway.scheduler.welcomes = asyncio.Event()
    await gateway.start("--api-keys", str(key_file))
    async with asyncio.timeout(WITHIN_S):
        while not await gateway.says_yes(f"{gateway.url}/health"):  # until the first of them serves
            await asyncio.sleep(0.02)
    assert not await gateway.ready()
    gateway.scheduler.welcomes.set()
    await gateway.until_ready()
    before = (await gateway.at_rest())["lockstep_gateway_requests_total"]
    held = asyncio.Event()
    gateway.scheduler.script = lambda submit: Script(([40], held, [EOS]))
    first = [asyncio.create_task(gateway.chat(key)) for _ in range(6)]
    await gateway.until(lambda: len(gateway.scheduler.submits) == 6)
    assert [answer.status_code for answer in await asyncio.gather(*(gateway.chat(key) for _ in range(8)))] == [429] * 8
    async with asyncio.timeout(WITHIN_S):
        while (await gateway.metrics())["lockstep_gateway_inflight_requests"] != 6:  # what was refused may be counted for a moment
            await asyncio.sleep(0.02)
    held.set()
    assert [answer.status_code for answer in await asyncio.gather(*first)] == [200] * 6
    totals = await gateway.at_rest()
    assert totals["lockstep_gateway_requests_total"] == before + 14
    assert totals["lockstep_gateway_time_to_first_token_seconds_count"] == 6
    assert (totals["lockstep_gateway_backend_up"], totals["lockstep_build_info"]) == (1, 1)

    # One dies: the port goes on, it comes back, and no count falls.
    dead = gateway.children()[0]
    dead.send_signal(signal.SIGKILL)
    await gateway.until(lambda: len(scheduler_names(gateway.scheduler)) == 3)
    await gateway.until(lambda: dead not in gateway.children() and len(gateway.children()) == 2)
    assert (await gateway.metrics())["lockstep_gateway_requests_total"] >= before + 14
    assert [answer.status_code for answer in await asyncio.gather(*(gateway.chat(key) for _ in range(6)))] == [200] * 6
    await gateway.at_rest()
    assert "starting it again" in gateway.log.read_text()

    # A signal: streams that run go on to their end, in whichever process.
    held = asyncio.Event()
    running = [asyncio.create_task(gateway.chat(key, stream=True)) for _ in range(6)]
    await gateway.until(lambda: len(gateway.scheduler.submits) == 18)
    gateway.process.terminate()
    while await gateway.ready():
        await asyncio.sleep(0.02)
    held.set()
    assert all(answer.content.endswith(b"data: [DONE]\n\n") for answer in await asyncio.gather(*running))
    assert await asyncio.wait_for(gateway.process.wait(), WITHIN_S) == 0


TOLD = '# TYPE a_total counter\na_total{x="1"} %d\n# TYPE lockstep_gateway_backend_up gauge\nlockstep_gateway_backend_up %d\n'


def test_what_processes_tell_is_added_up() -> None:
    families = [family for told in ((2, 1), (3, 0)) for family in text_string_to_metric_families(TOLD % told)]
    samples = {(sample.name, sample.labels.get("x")): sample.value for family in merged(families) for sample in family.samples}
    assert samples == {("a_total", "1"): 5, ("lockstep_gateway_backend_up", None): 0}


def test_both_formats_of_the_merged_view_are_read_by_their_parsers() -> None:
    registry = MergedRegistry("127.0.0.1")
    GatewayMetrics("tiny", "127.0.0.1:1", registry).request("/v1/completions").ended(200)
    texts = [families_of(parser(write(registry).decode())) for parser, write in FORMATS]
    assert texts[0] == texts[1]
    assert "lockstep_gateway_requests" in texts[0]


FORMATS = ((text_string_to_metric_families, generate_latest), (openmetrics_families, generate_openmetrics))


def families_of(families: Iterable[Metric]) -> dict[str, int]:
    """How many samples each has."""
    return {family.name: len(family.samples) for family in families}
