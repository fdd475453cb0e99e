"""Programs that nobody here wrote, each in an environment of its own, against `lockstep serve`."""

import json
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests import tiny
from tests.services.local.launched import Launched
from tests.system.conftest import execute, require_space

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("clients")
CLIENTS = {  # environments, by what is installed into them
    "sdks": ("openai==3.57.0", "langchain-openai==1.7.4", "litellm==1.110.2"),
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
    "aiperf": ("aiperf==0.13.0",),
    "schemathesis": ("schemathesis==4.32.5",),
}
INSTALL_S, RUN_S = 1000, 400
ENVIRONMENTS_BYTES = 3_000_000_000
QUESTIONS = [
    ("The capital of France is", [" Paris", " a small model"], 0),
    ("Once upon a time there was a small", [" model", " France"], 0),
    ("It said hello,", [" world", " heads"], 0),
    ("The model had", [" two layers", " happy"], 0),
]
TASK = {
    "task": "told",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}

Run = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with a context in which load generators have room and a template that knows tools."""
    folder = tiny.tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)
    tiny.tiny_tokenizer(folder, tiny.TOOL_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[str]:
    launched = Launched(tmp_path_factory.mktemp("serve"), "serve", str(model), "--port", "0")
    try:
        yield str(launched.ready()["url"])
        launched.press_ctrl_c()
        assert launched.end() == 0
    finally:
        launched.clean_up()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run("lm-eval", "lm_eval", ...)` starts a program of an environment, which is made when it is first asked for; returns its output."""
    folder = tmp_path_factory.mktemp("environments")
    require_space(folder, ENVIRONMENTS_BYTES, "what the clients install")
    installed: set[str] = set()
    torch_pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    (folder / "constraints.txt").write_text(f"{torch_pin}\n")  # none of the clients needs it; should one pull it, then not CUDA's

    def start(environment: str, program: str, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
        programs = folder / environment / "bin"
        if environment not in installed:
            venv.create(folder / environment, with_pip=True)
            execute([programs / "pip", "install", "--quiet", "--constraint", folder / "constraints.txt", *CLIENTS[environment]], INSTALL_S)
            installed.add(environment)
        with tempfile.TemporaryDirectory() as temporary:  # some leave folders there
            path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
            home = {"HOME": str(folder), "PATH": path, "TMPDIR": temporary, **(variables or {})}
            return execute([programs / program, *arguments], RUN_S, env=home, cwd=folder)

    return start


@pytest.mark.timeout(INSTALL_S + RUN_S)
@pytest.mark.parametrize("script", ["use_openai.py", "use_langchain.py", "use_litellm.py"])
def test_sdks(run: Run, url: str, script: str) -> None:
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks GitHub for prices
    run("sdks", "python", str(SCRIPTS / script), url, "tiny", variables=variables)


@pytest.mark.timeout(INSTALL_S + RUN_S)
def test_lm_eval_scores_as_transformers_does(run: Run, url: str, model: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"question": question, "choices": choices, "answer": answer}) for question, choices, answer in QUESTIONS]
    (tmp_path / "told.jsonl").write_text("\n".join(lines) + "\n")
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(tmp_path / "told.jsonl")}}}
    (tmp_path / "told.yaml").write_text(json.dumps(task))  # which is YAML too
    options = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer_backend": "huggingface", "tokenizer": str(model)}
    options |= {"num_concurrent": "4", "max_retries": "1", "max_length": "2048"}
    arguments = ["--model", "local-completions", "--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
    arguments += ["--tasks", "told", "--include_path", str(tmp_path), "--log_samples", "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    run("lm-eval", "lm_eval", "run", *arguments, variables=offline)
    (samples,) = (tmp_path / "out").rglob("samples_told_*.jsonl")
    expected = transformers_scores(model)
    for line in samples.read_text().splitlines():
        sample: dict[str, Any] = json.loads(line)
        scores = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert scores == pytest.approx(expected[sample["doc"]["question"]], abs=1e-3)


def transformers_scores(folder: Path) -> dict[str, Sequence[float]]:
    """Log-probability of each choice after its question, by question."""
    tokenizer, network = PreTrainedTokenizerFast.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    scores: dict[str, Sequence[float]] = {}
    for question, choices, _ in QUESTIONS:
        begun = len(tokenizer.encode(question, add_special_tokens=False))
        of_choices = []
        for choice in choices:
            ids = torch.tensor([tokenizer.encode(question + choice, add_special_tokens=False)])
            with torch.no_grad():
                logprobs = network(ids).logits[0].log_softmax(dim=-1)
            of_choices.append(sum(logprobs[place - 1, ids[0, place]].item() for place in range(begun, ids.shape[1])))
        scores[question] = of_choices
    return scores


@pytest.mark.timeout(INSTALL_S + RUN_S)
def test_aiperf_measures_a_short_load(run: Run, url: str, model: Path, tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(model)]
    arguments += ["--request-count", "40", "--concurrency", "8", "--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "16"]
    arguments += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none", "--artifact-dir", str(tmp_path)]
    run("aiperf", "aiperf", "profile", *arguments)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (report["request_count"]["avg"], report["error_summary"]) == (40, [])
    assert report["output_sequence_length"]["avg"] == pytest.approx(16, abs=1)
    assert report["time_to_first_token"]["p50"] < report["request_latency"]["p50"]


@pytest.mark.timeout(INSTALL_S + RUN_S)
def test_generated_requests_get_what_the_openapi_document_says(run: Run, tmp_path: Path) -> None:
    """Some hundred of them; `schemathesis run --max-examples 500` by hand makes thousands."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_s": 0.0005, "default": {"ids": [40, 41, 42, 43], "repeat": True}}))
    engine = ["--engine", "scripted", "--script", str(script)]
    launched = Launched(tmp_path, "serve", str(tiny.weightless_model(tmp_path / "tiny")), *engine, "--port", "0")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--phases", "coverage,fuzzing", "--max-examples", "10", "--checks", checks, "--suppress-health-check", "all"]
    try:
        document = f"{launched.ready()['url']}/openapi.json"
        told = run("schemathesis", "schemathesis", "run", document, *options, "--seed", "1", "--no-color")
        assert "generated" in told
        launched.press_ctrl_c()
        assert launched.end() == 0
    finally:
        launched.clean_up()
