"""Downloads from a hub on the loopback that answers as huggingface_hub asks."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "c0ffee00" * 5
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"pickled",
    "original/params.json": b"{}",
}


class Hub(BaseHTTPRequestHandler):
    """One repository, `some/model`, whose files are the class's; asked with a token that is not `secret`, it refuses."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if self.headers.get("Authorization") != "Bearer secret":
            return self.reply(401, b"", body, {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/some/model/tree/"):
            tree = [{"type": "file", "path": name, "size": len(content), "oid": name} for name, content in FILES.items()]
            return self.reply(200, json.dumps(tree).encode(), body)
        if path.startswith("/api/models/some/model"):
            return self.reply(
                200, json.dumps({"id": "some/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in FILES]}).encode(), body
            )
        name = path.partition("/resolve/")[2].partition("/")[2]
        if path.startswith("/some/model/") and name in FILES:
            if body:
                self.asked.append(name)
            return self.reply(200, FILES[name], body, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return self.reply(404, b"", body, {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def download(hub: str, repository: str, folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_TOKEN": token, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "services.worker.weights.download", repository, "main", str(folder / "model")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_only_what_a_worker_reads_is_downloaded(hub: str, tmp_path: Path) -> None:
    done = download(hub, "some/model", tmp_path, "secret")
    assert done.returncode == 0, done.stderr
    wanted = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "model").iterdir() if path.is_file()} == wanted
    assert (tmp_path / "model/model.safetensors").read_bytes() == b"weights"
    assert set(Hub.asked) == wanted


@pytest.mark.parametrize("repository, token", [("some/other", "secret"), ("some/model", "wrong"), ("no/such/name", "secret")])
def test_a_refusal_is_one_line_that_names_the_repository(hub: str, tmp_path: Path, repository: str, token: str) -> None:
    done = download(hub, repository, tmp_path, token)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"lockstep-download: {repository} at main: ")
    assert "Traceback" not in done.stderr
    assert token not in done.stderr
