"""Facts about the repository as a whole that break unseen: pins, names, what imports what, and whether the stubs are fresh."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TINY_FORWARD = """
import kernels, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_kernels_available

assert not is_kernels_available(), "transformers takes our package `kernels` for the hub's"
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
logits = LlamaForCausalLM(config)(torch.arange(5)[None]).logits
assert logits.shape == (1, 5, 32) and logits.isfinite().all()
print(kernels.__file__)
"""
IMPORT_ALL = """
import importlib, sys

for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = {"torch", "triton", "kernels"} & sys.modules.keys()
    assert not loaded, f"{name} loads {sorted(loaded)}"
"""
WITHOUT_A_WEB_SERVER = """
import sys

sys.modules.update(dict.fromkeys(("uvicorn", "fastapi", "starlette", "httptools", "kubernetes")))  # an import of them fails
import benchmarks.__main__
import services.local.llm
"""


def python(code: str, *arguments: str) -> str:
    """Runs code in a process of its own, from the root, as a service would be started; returns what it printed."""
    process = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


def modules(*packages: str) -> Iterator[str]:
    """Every module of these packages, in order; `a.b.__main__` too, whose import must start nothing."""
    for package in packages:
        for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_version_is_not_one_that_transformers_takes_for_the_hub_package() -> None:
    assert not PROJECT["version"].startswith("0.18.")


def test_hub_package_kernels_is_not_installed() -> None:
    names = {canonical(distribution.name) for distribution in importlib.metadata.distributions()}
    assert "kernels" not in names | pins().keys()


def test_transformers_computes_beside_our_kernels() -> None:
    assert Path(python(TINY_FORWARD)).parent == ROOT / "kernels"


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_every_dependency_is_pinned(extra: str) -> None:
    names = [canonical(re.split(r"[\[<>=!~; ]", dependency)[0]) for dependency in PROJECT["optional-dependencies"][extra]]
    assert set(names) - {PROJECT["name"]} <= pins().keys()


def test_gateway_scheduler_and_shared_load_no_torch() -> None:
    python(IMPORT_ALL, *modules("shared", "services.gateway", "services.scheduler"))


def test_kernels_import_only_torch_and_triton() -> None:
    graph = grimp.build_graph("kernels", include_external_packages=True, cache_dir=None)
    modules_of_ours = graph.find_descendants("kernels") | {"kernels"}
    imported = {name.split(".")[0] for module in modules_of_ours for name in graph.find_modules_directly_imported_by(module)}
    assert imported - sys.stdlib_module_names <= {"kernels", "torch", "triton"}


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """If this fails: `make proto`."""
    own_environment = ["--assume-old=.venv/stamp", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(["make", "--silent", *own_environment, "proto", f"STUBS={tmp_path}"], cwd=ROOT, check=True)
    fresh, committed = ({path.name: path.read_text() for path in (root / "shared/protocol").glob("*_pb2*")} for root in (tmp_path, ROOT))
    assert fresh == committed


def test_models_are_measured_without_a_web_server() -> None:
    """GPU machines' images hold torch and little else; what the benchmarks of models need beside it is carried there."""
    python(WITHOUT_A_WEB_SERVER)
