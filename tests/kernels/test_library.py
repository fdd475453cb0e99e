import pytest
import torch
import torch.nn.functional as F
import triton

from kernels.library import library_linear
from kernels.tuning import Tables
from tests.kernels.support import ON_GPU, assert_near, randn

ROWS = {1: True, 64: True, 65: False, 128: False, 129: True, 256: True, 257: False}  # and whether cuBLASLt is to multiply


@pytest.fixture
def measured(tables: Tables) -> None:
    tables[triton.__version__] = {"16 bits": {"library": {"96x64": {"64": [1], "128": [], "256": [1]}}}}


@pytest.mark.usefixtures("measured")
def test_the_table_says_which_of_the_two_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = ["cublas"]

    def preferred(library: object = None) -> object:
        chosen.extend([library] if library else [])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)  # of which a CPU's torch has one only
    x, weight, bias = (randn(*shape, seed=1, dtype=torch.bfloat16) for shape in ((257, 64), (96, 64), (96,)))
    for rows, lt in ROWS.items():
        chosen[1:] = []
        assert library_linear(x[:rows], weight, bias).equal(F.linear(x[:rows], weight, bias))
        assert chosen[1:] == (["cublaslt", "cublas"] if lt else [])
    assert library_linear(x[:1].float(), weight.float()).equal(F.linear(x[:1].float(), weight.float()))
    assert chosen[1:] == []


@pytest.mark.skipif(not ON_GPU, reason="a CPU's torch has no cuBLASLt")
@pytest.mark.usefixtures("measured")
def test_both_compute_the_product() -> None:
    before = torch.backends.cuda.preferred_blas_library()
    weight, bias = (randn(*shape, seed=2, dtype=torch.bfloat16) for shape in ((96, 64), (96,)))
    for rows in ROWS:
        x = randn(rows, 64, seed=rows, dtype=torch.bfloat16)
        assert_near(library_linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()), ulps=2, floor=1e-5)
        assert torch.backends.cuda.preferred_blas_library() == before
