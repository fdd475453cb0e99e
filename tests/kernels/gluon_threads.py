"""Runs a Gluon kernel where there is no GPU: its Python source, with a thread for each partition of warps, one program after the other.

Tensors are NumPy arrays, without layouts. Products and a thread's own copies happen when they are waited for, those of the copy engine
when they are asked for or as late as their barrier allows: a kernel must be right in both cases. Shared memory begins as NaN. What
only a compiled kernel shows, layouts, fences and registers, it does not.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

DEADLOCK_S = 5.0


class Values(np.ndarray):
    """A tensor or scalar in registers."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)


def values(array: Any) -> Any:
    return np.asarray(array).view(Values)


class Pointer:
    def __init__(self, memory: Any, offset: Any = 0) -> None:
        self.memory, self.offset = memory, np.asarray(offset, np.int64)
        self.dtype = SimpleNamespace(element_ty=memory.dtype.type)

    def __add__(self, distance: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + np.asarray(distance, np.int64))

    def places(self, mask: Any) -> tuple[Any, Any]:
        """Offsets and mask of one shape. Raises IndexError where an access leaves the memory."""
        mask = np.broadcast_to(True if mask is None else mask, self.offset.shape)
        if np.any(mask & ((self.offset < 0) | (self.offset >= self.memory.size))):
            raise IndexError("an access outside of its tensor")
        return np.where(mask, self.offset, 0), mask


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    offset, mask = pointer.places(mask)
    return values(np.where(mask, pointer.memory[offset], pointer.memory.dtype.type(other)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, mask = pointer.places(mask)
    pointer.memory[offset[mask]] = np.asarray(value)[mask]


class Shared:
    """A buffer. One of three dimensions has rows that are wider than the swizzle: `[parts of a row, rows, columns of a part]`."""

    def __init__(self, memory: Any, transposed: bool = False) -> None:
        self.memory, self.transposed = memory, transposed

    @property
    def shape(self) -> Any:
        return self.memory.shape

    def index(self, index: int) -> Any:
        if not 0 <= index < len(self.memory):
            raise IndexError(f"buffer {index} of {len(self.memory)}")
        item = self.memory[int(index)]
        return item if isinstance(item, Barrier) else Shared(item)

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.memory, True)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        part = self.memory.shape[-1]
        return Shared(self.memory.reshape(shape[0], shape[2] // part, shape[1], part))

    def load(self, layout: Any = None) -> Any:
        whole = np.concatenate(list(self.memory), axis=1) if self.memory.ndim == 3 else self.memory
        return values((whole.T if self.transposed else whole).copy())

    def store(self, value: Any) -> None:
        self.memory[...] = value


class Barrier:
    def __init__(self) -> None:
        self.changed, self.phase, self.count, self.pending, self.bytes = threading.Condition(), 0, 0, 0, 0
        self.copies: list[Callable[[], int]] = []

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected_bytes: int = 0, copied_bytes: int = 0) -> None:
        with self.changed:
            self.pending, self.bytes = self.pending - count, self.bytes + expected_bytes - copied_bytes
            assert self.pending >= 0
            if self.pending == self.bytes == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        def has_passed() -> bool:
            while self.phase == phase and self.copies:
                with suppress(IndexError):  # another thread was faster
                    self.arrive(0, copied_bytes=self.copies.pop(0)())
            return self.phase != phase

        with self.changed:
            if not self.changed.wait_for(has_passed, DEADLOCK_S):
                raise TimeoutError("a barrier that nobody passes")


class Product:
    """Of a thread of warps; its value is known after the wait for it."""

    value: Any = None


class Program:
    """What the kernel's names mean to one program. Copies of the copy engine are `eager`, or late."""

    def __init__(self, number: int, programs: int, eager: bool) -> None:
        self._own, self._eager = threading.local(), eager
        layout = lambda *_, **__: None  # noqa: E731
        self.gl = SimpleNamespace(
            program_id=lambda axis: values(number), num_programs=lambda axis: values(programs), num_warps=lambda: 4,
            constexpr=object, static_range=range, int16=np.int16, int32=np.int32, int64=np.int64, float32=np.float32, bfloat16=None,
            BlockedLayout=layout, SliceLayout=layout, DotOperandLayout=layout, NVMMADistributedLayout=layout,
            arange=lambda first, last, layout: values(np.arange(first, last, dtype=np.int32)),
            zeros=lambda shape, dtype, layout: values(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: values(np.full(shape, value, dtype)),
            load=load, store=store, where=lambda condition, a, b: values(np.where(condition, a, b)).to(getattr(a, "dtype", np.int32)),
            minimum=lambda a, b: values(np.minimum(a, b)), maximum=lambda a, b: values(np.maximum(a, b)),
            exp2=lambda x: values(np.exp2(x)), max=lambda x, axis: values(x.max(axis)),
            sum=lambda x, axis: values(x.sum(axis, dtype=x.dtype)),
            associative_scan=lambda x, axis, add: values(np.cumsum(x, axis, dtype=x.dtype)),
            reshape=lambda x, shape: x.reshape(shape), split=lambda x: (x[..., 0], x[..., 1]),
            join=lambda a, b: values(np.stack((a, b), -1)), convert_layout=lambda x, layout: x,
            inline_asm_elementwise=self._pack, thread_barrier=lambda: None,
            allocate_shared_memory=self._allocate, warp_specialize=self._specialize,
        )  # fmt: skip
        self.names = {
            "gl": self.gl,
            "mbarrier": SimpleNamespace(
                init=Barrier.init,
                wait=Barrier.wait,
                arrive=Barrier.arrive,
                expect=lambda barrier, size: barrier.arrive(expected_bytes=size),
                MBarrierLayout=layout,
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self._fetch),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=lambda buffer, pointer, mask: self._later("copies", lambda: buffer.store(load(pointer, mask))),
                commit_group=lambda: None,
                wait_group=lambda outstanding: self._wait("copies", outstanding),
            ),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "fence_async_shared": lambda: None,
            "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None,
        }

    def _later(self, kind: str, work: Callable[[], None]) -> None:
        self._own.__dict__.setdefault(kind, []).append(work)

    def _wait(self, kind: str, outstanding: int) -> None:
        waiting = self._own.__dict__.get(kind, [])
        while len(waiting) > outstanding:
            waiting.pop(0)()

    def _multiply(self, a: Any, b: Shared, accumulator: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        product = Product()

        def work() -> None:
            left, right = (each.load() if isinstance(each, Shared) else each for each in (a, b))
            with np.errstate(invalid="ignore"):  # of NaN in keys that nobody sees
                product.value = left.astype(np.float32) @ right.astype(np.float32) + (accumulator if use_acc else np.float32(0))

        self._later("products", work)
        return product

    def _wait_for_products(self, outstanding: int, deps: list[Any]) -> Any:
        self._wait("products", outstanding)
        found = tuple(values(each.value) if isinstance(each, Product) else each for each in deps)
        return found[0] if len(found) == 1 else found

    def _fetch(self, source: TensorDescriptor, place: list[int], barrier: Barrier, buffer: Shared) -> None:
        def copy() -> int:
            rows, columns = source.base.numpy().reshape(source.shape)[int(place[0]) :, int(place[1]) :].shape
            height, width = source.block_shape
            assert width <= columns
            found = source.base.numpy().reshape(source.shape)[int(place[0]) :, int(place[1]) : int(place[1]) + width][:height]
            buffer.store(np.pad(found, ((0, height - min(rows, height)), (0, 0))))
            return int(buffer.memory.nbytes)

        if self._eager:
            barrier.arrive(0, copied_bytes=copy())
        else:
            with barrier.changed:
                barrier.copies.append(copy)
                barrier.changed.notify_all()

    def _pack(self, instruction: str, constraints: str, arguments: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        assert instruction.startswith("cvt.rn.f16x2.f32")
        return values(np.stack(arguments, -1).astype(np.float16)).view(np.int32)[..., 0]

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        if dtype is np.int64:
            barriers = np.empty(shape[0], object)
            barriers[:] = [Barrier() for _ in range(shape[0])]
            return Shared(barriers)
        return Shared(np.full(shape, np.nan, dtype))

    def _specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        errors: list[BaseException] = []

        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # raised again below, in the thread of the test
                errors.append(error)

        threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Threads:
    """Stands for a kernel in its module: `Threads(kernel, eager)[grid](...)`."""

    def __init__(self, kernel: GluonJITFunction[Any], eager: bool) -> None:
        self._kernel, self._eager = kernel, eager

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, maxnreg: int, launch_pdl: bool, **named: Any) -> None:
            given = [Pointer(_flat(each)) if isinstance(each, Tensor) else each for each in arguments]
            given = [_described(each) if isinstance(each, TensorDescriptor) else each for each in given]
            for number in range(grid[0]):
                constants = {name: each.value for name, each in self._kernel.fn.__globals__.items() if isinstance(each, constexpr)}
                names = {**self._kernel.fn.__globals__, **constants, **Program(number, grid[0], self._eager).names}
                helpers = {name: value.fn for name, value in names.items() if isinstance(value, GluonJITFunction)}
                names |= {name: FunctionType(helper.__code__, names) for name, helper in helpers.items()}
                FunctionType(self._kernel.fn.__code__, names)(*given, **named)

        return launch


def _flat(tensor: Tensor) -> Any:
    """All memory from the tensor's first element on: it may have strides."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((elements,), (1,)).numpy()


def _described(source: TensorDescriptor) -> Any:
    return SimpleNamespace(
        base=source.base, shape=source.shape, block_shape=source.block_shape, layout=None,
        block_type=SimpleNamespace(shape=source.block_shape),
    )  # fmt: skip
