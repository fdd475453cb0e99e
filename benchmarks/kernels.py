"""What each kernel reaches of what the GPU can do: `python -m benchmarks kernels [OPERATION ...]`.

Launches are captured in a CUDA graph and timed over its replays, so that the host does not count. The ceilings, read
bandwidth and bfloat16 matrix products, are measured in the same run. KV caches rotate, so that they come from memory;
activations are as in a model in the cache that the kernel before left them in.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.candidates import products
from benchmarks.ceilings import measure_ceilings
from benchmarks.launches import DTYPE, L2_BYTES, REPLAYS, Case, Launch, randn, time_launches
from benchmarks.peers import PEERS
from benchmarks.products import Inputs, launches_of
from benchmarks.report import Report, Value
from benchmarks.slot_cases import logprob_cases, penalty_cases, sampling_cases, state_cases
from kernels.decode_attention import decode_attention
from kernels.embedding import embedding
from kernels.linear import begins_norm, gated_linear, linear, linear_add_norm
from kernels.moe import moe, moe_add_norm
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import Unscaled, add_rms_norm
from kernels.rope import rope_and_store
from kernels.rotated_attention import rotated_attention, rotates_within
from kernels.routing import route
from kernels.silu_and_mul import silu_and_mul
from shared.errors import ConfigError

PAGE_SIZE = 16
PRODUCT_ROWS = (1, 16, 64)


class KVCache:
    """`copies` times the KV cache of `rows` rows, pages shuffled over all of it; lengths uniform in `[shortest, longest]`."""

    def __init__(self, rows: int, kv_heads: int, head_size: int, shortest: int, longest: int, copies: int, max_tokens: int = 8192) -> None:
        generator = torch.Generator().manual_seed(rows)
        pages, slots = -(-longest // PAGE_SIZE), rows * copies
        self.k = torch.randn(pages * slots, PAGE_SIZE, kv_heads, head_size, device="cuda", dtype=DTYPE)
        self.v = torch.randn_like(self.k)
        page_table = torch.zeros(slots, max(max_tokens // PAGE_SIZE, pages), dtype=torch.int32)
        page_table[:, :pages] = torch.randperm(pages * slots, generator=generator).view(slots, pages)
        self.page_table = page_table.cuda()
        self.slots = torch.randperm(slots, generator=generator).int().cuda().view(copies, rows)
        lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator, dtype=torch.int32)
        self.lengths, self.total_tokens = lengths.cuda(), int(lengths.sum())


def eager_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(residual.add_(x), weight.shape, weight, 1e-6)


def eager_activation(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def norm_cases() -> Iterator[Case]:
    for tokens, size in ((1, 1024), (1, 5120), (32, 4096), (256, 1024), (256, 5120), (8192, 4096)):
        x, residual, weight = randn(tokens, size), randn(tokens, size), randn(size)
        ours, eager = partial(add_rms_norm, x, residual, weight, 1e-6), partial(eager_norm, x, residual, weight)
        yield Case(f"T={tokens} D={size}", 8.0 * tokens * size, "TB/s", [ours], [eager])


def activation_cases() -> Iterator[Case]:
    for tokens, size in ((1, 3072), (1, 14336), (32, 14336), (256, 3072), (256, 17408), (8192, 14336)):
        x = randn(tokens, 2 * size)
        yield Case(f"T={tokens} D={size}", 6.0 * tokens * size, "TB/s", [partial(silu_and_mul, x)], [partial(eager_activation, x)])


def embedding_cases() -> Iterator[Case]:
    weight = randn(151936, 2048)
    for tokens in (1, 256, 8192):
        ids = torch.randint(0, 151936, (tokens,), device="cuda")
        ours, eager = partial(embedding, ids, weight, 0), partial(F.embedding, ids, weight)
        yield Case(f"T={tokens} D=2048", 4.0 * tokens * 2048, "TB/s", [ours], [eager])


def rope_cases() -> Iterator[Case]:
    table = torch.randn(8192, 128, device="cuda")
    for tokens, q_heads, kv_heads in ((1, 16, 8), (1, 40, 8), (32, 32, 8), (256, 16, 8), (256, 40, 8), (8192, 32, 8)):
        qkv, norm = randn(tokens, q_heads + 2 * kv_heads, 128), randn(128)
        q, k, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
        positions = torch.randint(0, 8192, (tokens,), device="cuda", dtype=torch.int32)
        k_cache, v_cache = randn(2, tokens // PAGE_SIZE + 64, PAGE_SIZE, kv_heads, 128)
        locations = torch.randperm(k_cache.shape[0] * PAGE_SIZE, device="cuda")[:tokens]
        ours = partial(rope_and_store, q, k, v, positions, table, locations, k_cache, v_cache, norm, norm)
        yield Case(f"T={tokens} Q={q_heads} K={kv_heads} H=128", 4.0 * qkv.numel(), "TB/s", [ours])


def decode_cases() -> Iterator[Case]:
    for q_heads, kv_heads, head_size in ((16, 8, 128), (32, 8, 128), (40, 8, 128), (14, 2, 64)):
        for rows, shortest, longest in (*((rows, 800, 1100) for rows in (1, 4, 8, 32, 64, 256)), (256, 1088, 1088)):
            copies = max(1, min(32, L2_BYTES // (rows * 2000 * kv_heads * head_size) + 1))
            cache, q = KVCache(rows, kv_heads, head_size, shortest, longest, copies), randn(rows, q_heads, head_size)
            shared = (cache.lengths, head_size**-0.5)
            ours: list[Launch] = [partial(decode_attention, q, cache.k, cache.v, cache.page_table, slots, *shared) for slots in cache.slots]
            work = 4.0 * cache.total_tokens * kv_heads * head_size
            length = f"{shortest}-{longest}" if shortest < longest else str(longest)
            yield Case(f"B={rows} Q={q_heads} K={kv_heads} H={head_size} length {length}", work, "TB/s", ours)


def prefill_cases() -> Iterator[Case]:
    """Beside SDPA's flash attention, which gets contiguous keys with the KV heads repeated."""
    for q_heads, kv_heads, rows, length in ((16, 8, 1, 8192), (16, 8, 16, 1024), (40, 8, 1, 8192), (40, 8, 16, 1024), (32, 8, 64, 256)):
        cache, q = KVCache(rows, kv_heads, 128, length, length, copies=1), randn(rows * length, q_heads, 128)
        starts = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32)
        rest = (cache.slots[0], starts, cache.lengths, length, 128**-0.5)
        ours = partial(prefill_attention, q, cache.k, cache.v, cache.page_table, *rest)
        flash = partial(flash_attention, *randn(3, rows, q_heads, length, 128))
        work = 4.0 * q_heads * 128 * rows * length * (length + 1) / 2
        yield Case(f"{rows} x {length} tokens Q={q_heads} K={kv_heads} H=128", work, "TFLOP/s", [ours], [flash])


class Layer:
    """A dense decode layer with its cache."""

    def __init__(self, rows: int, hidden: int, q_heads: int, kv_heads: int, inner: int, cache: KVCache, slots: Tensor) -> None:
        self.counts, self.cache, self.slots = [q_heads, kv_heads, kv_heads], cache, slots
        self.norm, self.head_norm, self.table = randn(hidden), randn(128), torch.randn(8192, 128, device="cuda")
        self.qkv, self.output = randn((q_heads + 2 * kv_heads) * 128, hidden) / 32, randn(hidden, q_heads * 128) / 32
        self.gate_up, self.down = randn(2 * inner, hidden) / 32, randn(hidden, inner) / 32
        self.x, self.residual = randn(rows, hidden), randn(rows, hidden)
        positions = cache.lengths - 1
        pages = cache.page_table[slots.long(), (positions // PAGE_SIZE).long()].long()
        self.positions, self.locations = positions, pages * PAGE_SIZE + positions % PAGE_SIZE
        self.activated = randn(rows, inner)
        self.prepare()

    def prepare(self) -> None:
        """What the layer before leaves, by the tables as they are now."""
        self.normed = self._add(self.activated, self.down, self.qkv, False)

    def __call__(self) -> Tensor | Unscaled:
        """As the worker launches it: what the layer before left to what it leaves."""
        x = self._add(self.attend(linear(self.normed, self.qkv)), self.output, self.gate_up, True)
        return self._add(gated_linear(x, self.gate_up), self.down, self.qkv, False)

    def library(self) -> Tensor:
        """With the library's products: 9 kernels or, where attention rotates, 8, and what cuBLAS adds."""
        x = self.attend(F.linear(add_rms_norm(self.x, self.residual, self.norm, 1e-6), self.qkv))
        x = add_rms_norm(F.linear(x, self.output), self.residual, self.norm, 1e-6)
        return F.linear(silu_and_mul(F.linear(x, self.gate_up)), self.down)

    def attend(self, qkv: Tensor) -> Tensor:
        """The rotation, the store and attention, in one launch or two."""
        q, k, v = qkv.view(len(qkv), -1, 128).split(self.counts, dim=1)
        cache = self.cache
        places = self.positions, self.table, self.locations, cache.k, cache.v
        read, norms = (cache.page_table, self.slots, cache.lengths, 128**-0.5), (self.head_norm, self.head_norm)
        if rotates_within(q, cache.k, self.table, cache.page_table):
            return rotated_attention(q, k, v, *places, *read, None, *norms).flatten(1)
        q = rope_and_store(q, k, v, *places, *norms)
        return decode_attention(q, cache.k, cache.v, *read).flatten(1)

    def _add(self, x: Tensor, weight: Tensor, reader: Tensor, gated: bool) -> Tensor | Unscaled:
        if begins_norm(x, weight, reader, gated):
            return linear_add_norm(x, weight, None, self.residual, self.norm, 1e-6)
        return add_rms_norm(linear(x, weight), self.residual, self.norm, 1e-6)


class ExpertLayer(Layer):
    """A decode layer whose rows each go through some of its experts, the same ones each time."""

    def __init__(
        self, rows: int, hidden: int, q_heads: int, kv_heads: int, inner: int, cache: KVCache, slots: Tensor, experts: int, choices: int
    ) -> None:
        super().__init__(rows, hidden, q_heads, kv_heads, inner, cache, slots)
        self.router, self.logits, self.choices = randn(experts, hidden) / 32, randn(rows, experts), choices
        self.experts = randn(experts, 2 * inner, hidden) / 32, randn(experts, hidden, inner) / 32

    def prepare(self) -> None:
        self.normed = randn(len(self.x), self.x.shape[1])

    def __call__(self) -> Tensor:
        x = add_rms_norm(linear(self.attend(linear(self.normed, self.qkv)), self.output), self.residual, self.norm, 1e-6)
        linear(x, self.router)
        return moe_add_norm(x, *self.experts, self.logits, self.choices, True, self.residual, self.norm, 1e-6)


def layer_cases() -> Iterator[Case]:
    """A whole decode layer, beside the same with the library's products. Work: weights and cache, each read once."""
    for name, hidden, q_heads, inner in (("Qwen3-0.6B", 1024, 16, 3072), ("Llama-3.1-8B", 4096, 32, 14336), ("Qwen3-14B", 5120, 40, 17408)):
        for rows in (1, 8, 32, 64):
            copies = 8
            cache = KVCache(rows, 8, 128, 1024, 1152, copies)
            layers = [Layer(rows, hidden, q_heads, 8, inner, cache, slots) for slots in cache.slots]
            weights = sum(weight.nbytes for weight in (layers[0].qkv, layers[0].output, layers[0].gate_up, layers[0].down))
            work = weights + 4.0 * cache.total_tokens * 8 * 128
            yield Case(f"{name} B={rows} length 1024-1152", work, "TB/s", [*layers], [layer.library for layer in layers])


def product_cases() -> Iterator[Case]:
    """Of few rows, by the table or the library, beside the library alone. Work: the weights, read once."""
    for each in dict.fromkeys(product for name in PEERS for product in products(name)):
        for rows in PRODUCT_ROWS:
            inputs = Inputs(each, rows)
            ours: list[Launch] = [partial(gated_linear if each.gated else linear, inputs.x, weight) for weight in inputs.weights]
            library = launches_of(each, inputs.x, inputs.weights, None)
            yield Case(f"{each.operation} {each.columns}x{each.size} M={rows}", each.weight_bytes, "TB/s", ours, [*library])


def moe_cases() -> Iterator[Case]:
    """Qwen3-30B-A3B's experts. Work: the weights of the chosen experts or, where that takes longer, the products."""
    num_experts, hidden, inner, choices = 128, 2048, 768, 8
    gate_up = randn(num_experts, 2 * inner, hidden) / hidden**0.5
    down = randn(num_experts, hidden, inner) / inner**0.5
    logits = randn(256, num_experts)
    yield Case("route T=256 E=128 C=8", 2.0 * logits.numel(), "TB/s", [partial(route, logits, choices, True)])
    for tokens in (1, 8, 32, 128, 256, 1024, 8192):
        x = randn(tokens, hidden)
        routed = [randn(tokens, num_experts) for _ in range(8 if tokens <= 32 else 1)]
        launches: list[Launch] = [partial(moe, x, gate_up, down, each, choices, True) for each in routed]
        chosen = sum(len(each.topk(choices).indices.unique()) for each in routed) / len(routed)
        name = f"T={tokens} D={hidden} E={num_experts} C={choices} I={inner}"
        if tokens <= 1024:
            yield Case(name, chosen * 6 * hidden * inner, "TB/s", launches)
        else:
            yield Case(name, 6.0 * tokens * choices * hidden * inner, "TFLOP/s", launches)


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "add_rms_norm": norm_cases,
    "silu_and_mul": activation_cases,
    "embedding": embedding_cases,
    "rope_and_store": rope_cases,
    "decode_attention": decode_cases,
    "prefill_attention": prefill_cases,
    "products": product_cases,
    "decode_layer": layer_cases,
    "moe": moe_cases,
    "sampling": sampling_cases,
    "penalties": penalty_cases,
    "logprobs": logprob_cases,
    "state": state_cases,
}


def kernels(operations: Sequence[str]) -> Report:
    """Of these operations, or of all; each case is printed as it comes. Needs a GPU. Raises ConfigError for an operation that is none."""
    unknown = set(operations) - OPERATIONS.keys()
    if unknown:
        raise ConfigError(f"no operation: {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    if not torch.cuda.is_available():
        raise ConfigError("kernels are measured on a GPU, and none is here")
    ceilings = measure_ceilings()
    print(f"ceilings: {ceilings}")
    rows: list[Sequence[Value]] = []
    for name in operations or OPERATIONS:
        for case in OPERATIONS[name]():
            ours = time_launches(case.launches)
            eager = time_launches(case.torch_launches).median_us if case.torch_launches else None
            rate = case.work / ours.median_us * 1e6
            share = rate / (ceilings.read if case.unit == "TB/s" else ceilings.matrix)
            rows.append((name, case.shape, eager, ours.median_us, ours.p95_us, rate / 1e12, case.unit, f"{share:.1%}"))
            print(f"{name}: {case.shape}: {ours.median_us:.2f} us, {share:.1%} of the ceiling", flush=True)
    return Report(
        name="kernels",
        columns=("operation", "case", "torch us", "ours us", "p95 us", "rate", "unit", "of ceiling"),
        rows=rows,
        notes=(f"bfloat16, median of {REPLAYS} graph replays; ceilings, of this run: {ceilings}",),
        raw={"ceilings": ceilings._asdict()},
    )
