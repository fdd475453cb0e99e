"""Compiles every Triton kernel as the operations launch it, for GPUs that need not be here, and checks registers and shared memory.

The operations are called with CPU tensors and a launcher that only notes the kernel, its arguments and its options.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction
from triton.tools import tensor_descriptor

from kernels import (
    advance,
    all_reduce,
    counts,
    decode_attention,
    decode_splits,
    early_end,
    embedding,
    fixed_linear,
    launch,
    logprobs,
    mailboxes,
    moe,
    offering_head,
    offers,
    penalties,
    plan_unpack,
    prefill_attention,
    prefill_attention_hopper,
    rms_norm,
    rope,
    rotated_attention,
    sampling,
    silu_and_mul,
    skinny_linear,
    tuning,
    weighted_sum,
)
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels do not compile")

STACK_LIMIT = 40  # bytes of a thread: a few addresses kept across a loop; loops that spill take hundreds
SPILLING_STACK_LIMIT = 512
# Prefill attention of Hopper spills between its loops, once a tile; products of fixed tiles need not be fast.
# So does the head that chooses, when a tile's sums become scores.
SPILLING = {(prefill_attention_hopper.__name__, 90), (offering_head.__name__, 90), (fixed_linear.__name__, 80), (fixed_linear.__name__, 90)}
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes of a block
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
TABLES = sorted(Path(tuning.__file__).parent.glob("tuning_*.json"))
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BFLOAT16 = torch.bfloat16
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion", "launch_pdl")  # of a launch: how it is compiled


class Launch(NamedTuple):
    kernel: JITFunction[Any]
    arguments: dict[str, object]
    options: dict[str, object]


def source_of(noted: Launch) -> ASTSource:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(noted.kernel.params):
        value, name = noted.arguments[parameter.name], parameter.name
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):  # the launcher makes 1 a constant too
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, tensor_descriptor.TensorDescriptor):
            signature[name] = f"tensordesc<{DTYPE_NAMES[value.base.dtype]}{[*value.block_shape]}>"
        elif isinstance(value, Tensor):
            signature[name] = "*" + DTYPE_NAMES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{DTYPE_NAMES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32"
            if special and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return (GluonASTSource if noted.kernel.is_gluon() else ASTSource)(noted.kernel, signature, constants, attributes)


def stack_bytes(compiled: Any, folder: Path) -> int:
    """Of a thread: what did not fit in registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(usage.split("STACK:")[1].split()[0])


def zeros(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


def norms() -> None:
    for size in (1024, 4096, 5120, 8192):
        rms_norm.add_rms_norm_triton(zeros(4, size), zeros(4, size), zeros(size), 1e-6)
    for rows, size in ((4, 64), (400, 128), (1, 2048)):
        rms_norm.rms_norm_triton(zeros(rows, size), zeros(size), 1e-6)


def pointwise() -> None:
    for size in (64, 768, 14336):
        silu_and_mul.silu_and_mul_triton(zeros(4, 2 * size))
        embedding.embedding_triton(int32(4), zeros(8, size), 0)


def rotations() -> None:
    for tokens, q_heads, kv_heads, head_size, rotated in (
        (1, 14, 2, 64, 64),
        (500, 16, 8, 128, 128),
        (1, 40, 8, 128, 128),
        (500, 9, 3, 80, 32),
    ):
        qkv, norm, cache = zeros(tokens, q_heads + 2 * kv_heads, head_size), zeros(head_size), zeros(2, 16, kv_heads, head_size)
        q, k, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
        table, locations = zeros(9, rotated, dtype=torch.float32), zeros(tokens, dtype=torch.int64)
        rope.rope_and_store_triton(q, k, v, int32(tokens), table, locations, cache, cache, norm, norm)


def attention(head_size: int, q_heads: int, kv_heads: int, dtype: torch.dtype = BFLOAT16) -> None:
    cache, q = zeros(4, 16, kv_heads, head_size, dtype=dtype), zeros(300, q_heads, head_size, dtype=dtype)
    for rows, window in ((1, None), (300, 100)):  # split and not
        decode_attention.decode_attention_triton(q[:rows], cache, cache, int32(4, 512), int32(rows), int32(rows), 0.1, window)
    for rows, window in ((128, None), (4, 100)):
        prefill = q, cache, cache, int32(4, 512), int32(rows), int32(rows + 1), int32(rows), 300, 0.1, window
        prefill_attention.prefill_attention_triton(*prefill)
        if prefill_attention_hopper.is_served(q, cache):
            prefill_attention_hopper.prefill_attention_hopper(*prefill)


def rotated_rows(head_size: int, q_heads: int, kv_heads: int, dtype: torch.dtype = BFLOAT16) -> None:
    cache, norm = zeros(4, 16, kv_heads, head_size, dtype=dtype), zeros(head_size, dtype=dtype)
    table = zeros(9, head_size, dtype=torch.float32)
    for rows, window, weight, scale in ((1, None, norm, None), (16, 100, None, zeros(9, dtype=torch.float32))):
        q, k, v = zeros(rows, q_heads + 2 * kv_heads, head_size, dtype=dtype).split([q_heads, kv_heads, kv_heads], dim=1)
        places = int32(rows), table, zeros(rows, dtype=torch.int64), cache, cache
        read = int32(4, 512), int32(rows), int32(rows), 0.1, window
        rotated_attention.rotated_attention_triton(q, k, v, *places, *read, weight, weight, 1e-6, scale)


def mixture(tokens: int, fixed: bool = False, dtype: torch.dtype = BFLOAT16) -> None:
    logits, gate_up, down = zeros(tokens, 16, dtype=dtype), zeros(16, 512, 512, dtype=dtype), zeros(16, 512, 256, dtype=dtype)
    (moe.fixed_moe if fixed else moe.moe_triton)(zeros(tokens, 512, dtype=dtype), gate_up, down, logits, 8, True)


def expert_sums() -> None:
    """Qwen3-30B-A3B's, Mixtral's, several rows of a program, and one whose rows are not aligned."""
    for hidden, choices in ((2048, 8), (4096, 2), (7168, 8), (512, 8), (97, 3)):
        results, masses = zeros(4 * choices, hidden), zeros(4, choices, dtype=torch.float32)
        weighted_sum.weighted_sum_triton(results, masses, True)
        weighted_sum.weighted_sum_add_norm_triton(results, masses, True, zeros(4, hidden), zeros(hidden), 1e-6)


def measured(path: Path, *operations: str) -> Iterator[tuple[str, str, dict[str, list[int]]]]:
    """Operation, shape and entries of a file's tables: those of every Triton, since the one that runs may take them all."""
    read: tuning.Tables = json.loads(path.read_text())
    for table in read.values():
        for operation in operations:
            for shape, entries in table["16 bits"].get(operation, {}).items():
                yield operation, shape, entries


def tuned_attention(path: Path) -> None:
    """Every configuration of a table, as one launch or with the rotation before it."""
    for _, shape, entries in measured(path, "decode_attention"):
        q_heads, kv_heads, head_size = map(int, shape.split("x"))
        cache, norm, angles = zeros(4, 16, kv_heads, head_size), zeros(head_size), zeros(9, head_size, dtype=torch.float32)
        for rows, entry in entries.items():
            tuned, (q, k, v) = decode_splits.Config(*entry), zeros(3, int(rows), q_heads, head_size)
            read = int32(4, 512), int32(int(rows)), int32(int(rows)), 0.1
            if tuned.rotates:
                places = int32(int(rows)), angles, zeros(int(rows), dtype=torch.int64), cache, cache
                rotated_attention.rotated_attention_triton(q, k, v, *places, *read, None, norm, norm, tuned=tuned)
            decode_attention.decode_attention_triton(q, cache, cache, *read, tuned=tuned)


def tuned_experts(path: Path) -> None:
    """Every configuration of a table."""
    for _, shape, entries in measured(path, "moe"):
        experts, choices, hidden, inner = map(int, shape.split("x"))
        gate_up, down = zeros(experts, 2 * inner, hidden), zeros(experts, hidden, inner)
        for entry in entries.values():
            moe.moe_triton(zeros(2, hidden), gate_up, down, zeros(2, experts), choices, True, moe.config_of(entry))


def state() -> None:
    flags, slots = torch.zeros(9, dtype=torch.bool), int32(9)
    plan_unpack.plan_unpack_triton(int32(9, 64), slots, slots, flags, slots, int32(100), int32(100), int32(100), int32(500), 16)
    stop_ids, eos_ids = int32(9, 16), int32(3)
    advance.advance_triton(slots, slots, flags, slots, flags, stop_ids, eos_ids, slots, slots, slots, flags)
    early_end.forbid_early_end_triton(zeros(9, 32, dtype=torch.float32), slots, flags, stop_ids, eos_ids, slots, slots)


def logit_changes() -> None:
    logits, number, slots = zeros(4, 151936, dtype=torch.float32), zeros(9, dtype=torch.float32), int32(4)
    held, flags = counts.Held(int32(9, 151936), int32(9, 40961), int32(9)), torch.zeros(300, dtype=torch.bool)
    penalties.penalise_triton(logits, slots, held, number, number, number, int32(9, 300), zeros(9, 300, dtype=torch.float32))
    counts.count_triton(held, flags, int32(300), int32(300))
    counts.recount_triton(held, flags, slots, slots, flags, slots, int32(4096), int32(9, 64), 16)


def logprob_parts() -> None:
    for k in (0, 20):
        logprobs.logprobs_triton(zeros(4, 151936), int32(4), k)


def biased_products(columns: int, size: int) -> None:
    """One of each kind: a row without tensor cores, in one step and in several, and tiles of 16, 32 and 64 rows, with shares."""
    x, weight, bias = zeros(64, size), zeros(2 * columns, size), zeros(2 * columns)
    for tuned in (
        skinny_linear.Config(1, 8, 1024, 1, 4, 1, 0),
        skinny_linear.Config(1, 8, 512, 2, 4, 3, 1),
        skinny_linear.Config(16, 16, 256, 2, 4, 3, 4),
        skinny_linear.Config(32, 32, 128, 1, 4, 5, 0),
        skinny_linear.Config(64, 64, 128, 1, 8, 3, 8),
    ):
        skinny_linear.linear_triton(x[: tuned.row_block], weight[:columns], bias, tuned)


def tuned_products(path: Path) -> None:
    """Every configuration of a table, as it makes its part of a norm."""
    for operation, shape, entries in measured(path, "linear", "gated_linear"):
        columns, size = map(int, shape.split("x"))
        for rows, entry in filter(itemgetter(1), entries.items()):
            tuned, x, norm = skinny_linear.Config(*entry), zeros(int(rows), size), zeros(columns)
            assert tuned.width <= tuned.column_block
            weight = torch.empty(columns, size, dtype=BFLOAT16)
            read = rms_norm.Unscaled(x, zeros(int(rows), 256, dtype=torch.float32), 1e-6) if tuned.reads_unscaled else x
            if operation == "gated_linear":
                skinny_linear.gated_linear_triton(read, torch.empty(2 * columns, size, dtype=BFLOAT16), None, tuned)
            elif columns > 32_768:  # a rank's head
                skinny_linear.widened_linear_triton(x, weight, tuned)
            elif tuned.reads_unscaled:
                skinny_linear.linear_triton(read, weight, None, tuned)
            else:
                skinny_linear.linear_add_norm_triton(x, weight, None, zeros(int(rows), columns), norm, 1e-6, tuned)


def tuned_heads(path: Path) -> None:
    """Every configuration of a table: of greedy rows, of rows with a temperature, and of rows of which some ask for more."""
    for _, shape, entries in measured(path, "offering_head"):
        columns, size = map(int, shape.split("x"))
        weight = torch.empty(columns, size, dtype=BFLOAT16)
        for rows, entry in filter(itemgetter(1), entries.items()):
            count, tuned = int(rows), offering_head.Config(*entry)
            noise = zeros(count, dtype=torch.float32), zeros(count, dtype=torch.int64), int32(count)
            wanted: list[tuple[offering_head.Noise | None, Tensor | None, bool]] = [
                (None, None, False),
                (noise, None, False),
                (noise, int32(count), False),
                (noise, int32(count), True),
            ]
            for asked in wanted:
                offering_head.offering_head_triton(zeros(count, size), weight, columns, 0, *asked, tuned)
            offers.best_offer_triton(zeros(count, -(-columns // tuned.column_block), dtype=torch.int64))


def fixed_products() -> None:
    """Weights of each kind of tile."""
    for columns, size in ((1024, 3072), (6144, 5120), (34816, 4096)):
        x, weight = zeros(70, size), zeros(columns, size)
        fixed_linear.fixed_linear(x, weight, zeros(columns), torch.float32)
        fixed_linear.fixed_gated_linear(x, weight[: columns // 2 * 2])
    fixed_linear.fixed_gated_linear(zeros(70, 64, dtype=torch.float32), zeros(64, 64, dtype=torch.float32))


def sums() -> None:
    peers = mailboxes.Peers(1, 4, zeros(4, dtype=torch.int64))
    for way, size in zip(all_reduce.Way, (2560, 1 << 18, 1 << 20), strict=True):
        all_reduce.all_reduce(zeros(size), peers, way)
    all_reduce.all_reduce_add_rms_norm(zeros(4, 5120), zeros(4, 5120), zeros(5120), 1e-6, peers)


def samplers() -> None:
    logits, number = zeros(4, 151936, dtype=torch.float32), zeros(4, dtype=torch.float32)
    sampling.greedy_triton(logits)
    parameters = (number, int32(4), number, number, zeros(4, dtype=torch.int64), int32(4))
    sampling.sample_triton(logits, *parameters)
    sampling.sample_triton(logits.to(BFLOAT16), *parameters, 75968)
    sampling.sample_triton(logits, *parameters, offers=zeros(4, 2374, dtype=torch.int64))
    offers.offer_triton(logits, int32(4), 75968)
    offers.offer_triton(logits, int32(4), 75968, number, zeros(4, dtype=torch.int64), int32(4))
    offers.best_offer_triton(zeros(4, 2, dtype=torch.int64))


OPERATIONS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (norms, ()),
    (pointwise, ()),
    (state, ()),
    (rotations, ()),
    (attention, (64, 14, 2)),
    (attention, (96, 7, 1)),
    (attention, (128, 40, 8)),
    (attention, (256, 16, 8)),
    (attention, (64, 4, 4, torch.float32)),
    (rotated_rows, (64, 14, 2)),
    (rotated_rows, (96, 7, 1)),
    (rotated_rows, (128, 16, 8)),
    (rotated_rows, (128, 40, 8)),
    (rotated_rows, (256, 16, 8)),
    (rotated_rows, (64, 4, 4, torch.float32)),
    (mixture, (8,)),  # mean assignments of an expert up to 8, 32, 128 and above
    (mixture, (64,)),
    (mixture, (256,)),
    (mixture, (1024,)),
    (mixture, (8, True)),
    (mixture, (8, False, torch.float32)),
    (expert_sums, ()),
    (samplers, ()),
    (sums, ()),
    (logit_changes, ()),
    (logprob_parts, ()),
    (biased_products, (3072, 1024)),
    (fixed_products, ()),
]
TUNERS = tuned_products, tuned_heads, tuned_experts, tuned_attention
TUNED = [(90, tuned, (path,)) for tuned in TUNERS for path in TABLES]  # of GPUs of that generation, so far


@pytest.mark.parametrize("capability, operations, arguments", [(each, *called) for each in (80, 90) for called in OPERATIONS] + TUNED)
def test_compiles_within_registers_and_shared_memory(
    capability: int, operations: Callable[..., None], arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted: list[Launch] = []

    def note(kernel: JITFunction[Any], *positional: object, grid: object, warmup: bool, **named: object) -> None:
        options: dict[str, object] = {name: named.pop(name) for name in OPTIONS if name in named}
        noted.append(Launch(kernel, {**dict(zip(kernel.arg_names, positional, strict=False)), **named}, options))

    monkeypatch.setattr(JITFunction, "run", note)
    for module in (launch, moe, prefill_attention, prefill_attention_hopper):
        monkeypatch.setattr(module, "capability", lambda device: divmod(capability, 10))
    monkeypatch.setattr(decode_splits, "multiprocessors", lambda device: 132)
    operations(*arguments)

    assert noted
    distinct = {(source.hash(), str(each.options)): (each, source) for each in noted for source in [source_of(each)]}
    for launched, source in distinct.values():
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launched.options)
        what = f"{launched.kernel.__module__}.{launched.kernel.__name__} {launched.options}"
        assert compiled.metadata.shared <= SHARED_LIMIT[capability], what
        spills = (launched.kernel.__module__, capability) in SPILLING
        assert stack_bytes(compiled, tmp_path) <= (SPILLING_STACK_LIMIT if spills else STACK_LIMIT), what
