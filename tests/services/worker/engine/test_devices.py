"""What is refused before anything is loaded."""

from pathlib import Path

import pytest
import torch
import triton

from benchmarks.driver import spec
from kernels.tuning import borrowed, forget
from services.worker.engine.devices import check_gpu, communicator_of, device_of, dtype_of, tell_borrowed
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.settings import load

GPU, CPU, NOWHERE = torch.device("cuda", 0), torch.device("cpu"), Path("nowhere")


def test_ranks_without_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^device: 3000 ranks, 2 a GPU, need 1500 GPUs, this machine has \d+: set"):
        device_of(spec(NOWHERE, device="cuda", rank=2999, ranks=3000, ranks_per_gpu=2))


def test_cpu_is_taken_where_it_is_asked_for() -> None:
    assert device_of(spec(NOWHERE, device="cpu")) == CPU
    assert dtype_of(spec(NOWHERE), CPU) == torch.float32
    assert dtype_of(spec(NOWHERE), GPU) == torch.bfloat16
    assert dtype_of(spec(NOWHERE, dtype="float16"), GPU) == torch.float16


def test_ranks_that_share_a_gpu_add_up_through_main_memory() -> None:
    sharing = {"ranks": 2, "ranks_per_gpu": 2}
    assert communicator_of(spec(NOWHERE, **sharing, cuda_graphs=False), GPU) == "gloo"
    assert communicator_of(spec(NOWHERE, ranks=2), GPU) == "auto"
    assert communicator_of(spec(NOWHERE, **sharing), CPU) == "auto"
    with pytest.raises(ConfigError, match=r"^communicator: gloo goes through main memory"):
        communicator_of(spec(NOWHERE, **sharing), GPU)
    with pytest.raises(ConfigError, match=r"^communicator: pynccl: NCCL refuses ranks that share a GPU"):
        communicator_of(spec(NOWHERE, **sharing, communicator="pynccl", cuda_graphs=False), GPU)


def test_what_no_graph_can_hold_is_refused() -> None:
    check_gpu(spec(NOWHERE), 16)
    check_gpu(spec(NOWHERE, sampling_gather="candidates", cuda_graphs=False), 16)
    with pytest.raises(ConfigError, match=r"^sampling_gather: candidates"):
        check_gpu(spec(NOWHERE, sampling_gather="candidates"), 16)
    with pytest.raises(ConfigError, match=r"^max_model_len: on a GPU at least 16, got 15$"):
        check_gpu(spec(NOWHERE), 15)


def test_graphs_are_switched_off_on_the_command_line() -> None:
    for word in ("off", "false"):
        assert not load(WorkerSettings, "worker", ["--model", "nowhere", "--cuda-graphs", word]).cuda_graphs


def test_tiles_of_another_triton_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tell_borrowed(CPU)
    assert not caplog.records
    borrowed(CPU).update({"linear 64x1024": "3.1.0", "moe 4x2x64x32": "3.1.0"})
    tell_borrowed(CPU)
    forget()
    (record,) = caplog.records
    found = f"tiles of 2 shapes were found with Triton 3.1.0 and {triton.__version__} runs here: "
    assert record.getMessage().startswith(found)
    assert record.getMessage().endswith(" (linear 64x1024; moe 4x2x64x32)")
