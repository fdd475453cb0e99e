"""`lockstep serve` as its user meets it: it becomes ready, answers, mends what breaks, and leaves nobody behind however it ends."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.local.launcher import MOST_ENDS, is_loopback, reserved
from shared.addresses import host_port
from shared.errors import ConfigError
from tests.processes import eventually
from tests.services.local.launched import Launched

Serve = Callable[..., Launched]
SLOW_STEP_S = 0.05  # 240 tokens take longer than the launcher lets a gateway drain


@contextlib.contextmanager
def stream(run: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a long streamed answer."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 240, "stream": True}
    with httpx.stream("POST", f"{run['url']}/v1/completions", json=body, timeout=30) as answer:
        yield answer.iter_lines()


def ends_well(launched: Launched) -> bool:
    """Whether nobody is left, no run file, and no word of a fault."""
    complaints = [line for line in launched.output.splitlines() if line.startswith(("error", "warning"))]
    return launched.end() == 0 and not launched.run_files and not complaints


def test_it_tells_a_command_that_works_and_where_everything_is_until_ctrl_c(serve: Serve, model: Path) -> None:
    launched = serve("--served-model-name", "it's-tiny", "--served-model-name", "alias")
    run = launched.ready()
    launched.says("curl ")
    (line,) = [line for line in launched.output.splitlines() if line.startswith("curl ")]
    _, url, _, header, _, body = shlex.split(line)
    name, value = header.split(": ")
    answer = httpx.post(url, headers={name: value}, content=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "it's-tiny"
    assert {entry["id"] for entry in httpx.get(f"{run['url']}/v1/models").json()["data"]} == {"it's-tiny", "alias"}
    assert run["url"] == f"http://127.0.0.1:{run['ports']['gateway']}"
    assert (run["model"], run["served_model_names"]) == (str(model), ["it's-tiny", "alias"])
    assert run["pids"]["launcher"] == launched.process.pid
    for name in ("worker", "scheduler", "gateway"):
        assert f"services.{name}" in psutil.Process(run["pids"][name]).cmdline()
        with socket.create_connection(("127.0.0.1", run["ports"][name])):
            assert (Path(run["logs"]) / f"{name}.log").stat().st_size > 0
    launched.press_ctrl_c()
    assert ends_well(launched)


def test_start_up_is_told_in_lines_and_may_be_interrupted(serve: Serve) -> None:
    launched = serve(load_s=100)
    launched.says("loading weights 50%\n")
    assert launched.output.splitlines()[:3] == ["starting the worker", "starting the scheduler", "starting the gateway"]
    launched.press_ctrl_c()
    assert launched.end() == 0


def test_a_second_ctrl_c_does_not_wait_for_running_answers(serve: Serve) -> None:
    launched = serve(step_s=SLOW_STEP_S)
    with stream(launched.ready()) as lines:
        next(lines)
        launched.press_ctrl_c()
        launched.says("stopping")
        launched.press_ctrl_c()
        launched.says("killing the gateway")
    assert launched.end() == 0


def restarted(launched: Launched, run: dict[str, Any], victim: str) -> dict[str, Any]:
    """Kills a service. Returns what the run file tells once it is there again."""
    os.kill(run["pids"][victim], signal.SIGKILL)
    eventually(lambda: launched.ready()["pids"][victim] != run["pids"][victim])
    now = launched.ready()
    assert f"warning: the {victim} was killed by SIGKILL" in launched.output
    assert (now["ports"], now["url"]) == (run["ports"], run["url"])
    eventually(lambda: httpx.get(f"http://127.0.0.1:{now['admin_ports'][victim]}/livez", verify=False).is_success)
    return now


def test_streams_go_on_while_worker_and_scheduler_are_started_again_and_then_the_gateway_is(serve: Serve) -> None:
    launched = serve(step_s=0.02)
    run = launched.ready()
    assert run["served_model_names"] == ["tiny"]
    for victim in ("worker", "scheduler"):
        with stream(run) as lines:
            first = next(lines)
            run = restarted(launched, run, victim)
            chunks = [json.loads(line.removeprefix("data: ")) for line in (first, *lines) if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length", chunks[-1]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert len(text) == 240
        assert re.fullmatch("(FG)*F?(FG)*F?", text)  # each attempt plays the script from its beginning
    before = (Path(run["logs"]) / "gateway.log").read_text()
    run = restarted(launched, run, "gateway")
    eventually(lambda: httpx.get(f"{run['url']}/health", verify=False).is_success)
    after = (Path(run["logs"]) / "gateway.log").read_text()
    assert after.startswith(before)  # it goes on
    assert "] session with the scheduler at" in after[len(before) :]
    launched.press_ctrl_c()
    assert launched.end() == 0


def test_a_standby_takes_over(serve: Serve) -> None:
    launched = serve("--standby", step_s=0.02)
    run = launched.ready()
    with stream(run) as lines:
        next(lines)
        run = restarted(launched, run, "scheduler")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    log = Path(run["logs"]) / "scheduler-1.log"
    assert "leading, with epoch" in log.read_text() or "leading, with epoch 2" in (Path(run["logs"]) / "scheduler.log").read_text()


def test_a_service_that_ends_again_and_again_ends_the_others(serve: Serve) -> None:
    launched = serve()
    run = launched.ready()
    for _ in range(MOST_ENDS):
        run = restarted(launched, run, "scheduler")
    os.kill(run["pids"]["scheduler"], signal.SIGKILL)
    assert launched.end() == 1
    (line,) = [line for line in launched.output.splitlines() if line.startswith("error")]
    assert "the scheduler was killed by SIGKILL" in line
    assert not launched.run_files


def test_a_service_that_can_no_longer_start_ends_the_others(serve: Serve, model: Path) -> None:
    launched = serve()
    run = launched.ready()
    script = launched.folder / "script.json"
    script.write_text("{")
    os.kill(run["pids"]["worker"], signal.SIGKILL)
    assert launched.end() == 2
    assert "the worker ended with status 2" in launched.output


def test_a_killed_launcher_leaves_nobody(serve: Serve) -> None:
    launched = serve(step_s=SLOW_STEP_S)
    with stream(launched.ready()) as lines:
        next(lines)
        launched.process.kill()
        launched.process.wait()
        eventually(lambda: not launched.family.living())  # the gateway drains


def test_a_port_in_use_is_told_at_once(launch: Serve, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launched = launch("serve", str(model), "--port", str(port))
        assert launched.end() == 2
    (line,) = launched.output.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line


def test_a_model_that_does_not_fit_is_told(launch: Serve, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    launched = launch("serve", str(tmp_path / "empty"), "--port", "0")
    assert launched.end() == 2
    assert "config.json" in launched.output
    assert "the worker ended with status 2" in launched.output


def test_without_a_model_it_serves_the_demo_model_until_sigterm(launch: Serve) -> None:
    launched = launch("serve", "--engine", "scripted", "--port", "0")
    run = launched.ready()
    assert run["served_model_names"] == ["SmolLM2-135M-Instruct"]
    assert (Path(run["model"]) / "config.json").is_file()
    launched.process.terminate()
    assert ends_well(launched)


def test_ctrl_c_ends_the_download_of_the_demo_model(launch: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        launched = launch("serve", "--port", "0", XDG_CACHE_HOME=str(tmp_path), PIP_INDEX_URL=index, PIP_EXTRA_INDEX_URL="")
        connection, _ = silent.accept()
        with connection:
            launched.press_ctrl_c()
            assert launched.end() == 0


def test_without_keys_only_the_loopback_is_served(launch: Serve) -> None:
    launched = launch("serve", "--port", "0", "--host", "0.0.0.0")
    assert launched.end() == 2
    assert "--api-keys" in launched.output


def test_with_keys_any_address_is_served(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = subprocess.run(
        [sys.executable, "-m", "services.gateway", "key", "alice", "--file", str(file)], check=True, stdout=subprocess.PIPE, text=True
    )
    url = serve("--host", "0.0.0.0", "--api-keys", str(file)).ready()["url"]
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {made.stdout.strip()}"}).status_code == 200


@pytest.mark.parametrize("host, expected", [("localhost", True), ("127.8.9.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)])
def test_what_is_the_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_host_that_is_not_ours_is_told() -> None:
    assert host_port("::1", 80) == "[::1]:80"
    with pytest.raises(ConfigError, match=r"no\.host\.invalid:80"):
        reserved("no.host.invalid", 80)
