"""The plan: what a scheduler sends for one step of a group, in the layout that the device reads.

A plan is one array of little-endian int32. The supervisor checks it and passes the bytes on as they are; each rank copies them
once to its device, where one kernel unpacks them. D decode rows, P prefill rows, T prefill ids, G grants, R releases, N biases,
A admissions.

    header            [16]                see Header
    decode slots      [D]                 length, last token and done flag of a decode row live on the device
    decode flags      [D]                 see RowFlag
    prefill slots     [P]
    prefill starts    [P]                 position of the chunk's first token
    prefill lengths   [P]                 tokens of the chunk
    prefill flags     [P]
    prefill ids       [T]                 T = sum of the lengths, row after row
    grant slots       [G]                 page table of (slot, index) is set to page: an assignment, so idempotent
    grant indexes     [G]
    grant pages       [G]
    release slots     [R]                 sets the slot's done flag
    bias slots        [N]                 bias number index of the slot is (id, value): of slots admitted with SlotFlag.BIASES
    bias indexes      [N]
    bias ids          [N]
    bias values       [N]                 float32
    admissions        [A, 32]             see ADMISSION

A rank applies releases, then admissions with their biases, then grants, then computes the rows. Version 1 has no mask records: the
header keeps a field for their number.
"""

import struct
from dataclasses import dataclass, field, fields
from enum import IntEnum, IntFlag
from operator import attrgetter, itemgetter
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from shared.errors import LockstepError

Int32s = NDArray[np.int32]

VERSION = 1
MAX_BURST = 8  # iterations of one plan
MAX_PLAN_BYTES = 1 << 20
MAX_STOP_IDS = 16  # of one slot
MAX_BIASES = 300  # of one slot
MAX_BIAS = 100.0  # either way; so much makes an id certain, or forbids it
MAX_PENALTY = 2.0  # presence and frequency, either way
MAX_REPETITION = 64.0  # and at least its inverse, which is exact in float32
NO_STOP_ID = -1
SCRATCH_PAGE = 0  # where done rows write; never granted

NO_TOKEN = -1  # in results: the row was done, or this was not the prompt's last chunk
FAILED_ROW = -2  # in results: the row's logits were not finite


class PlanError(LockstepError):
    """A plan that must not be executed."""


class Header(IntEnum):
    """Index of each header field."""

    VERSION = 0
    SIZE = 1  # of the whole plan, in int32
    CHECKSUM = 2  # CRC-32 of all that follows this field
    PLAN_LOW = 3  # plan id, 64 bits
    PLAN_HIGH = 4
    FLAGS = 5  # see PlanFlag
    ITERATIONS = 6  # k: a decode plan may grant a burst
    ESTIMATE_US = 7  # of all iterations
    DECODE_ROWS = 8
    PREFILL_ROWS = 9
    PREFILL_IDS = 10
    GRANTS = 11
    RELEASES = 12
    ADMISSIONS = 13
    MASKS = 14  # 0 in version 1
    BIASES = 15


HEADER_SIZE = len(Header)


class PlanFlag(IntFlag):
    JUMP = 1  # may overtake plans that have not been launched


NO_FLAGS = PlanFlag(0)


class RowFlag(IntFlag):
    SAMPLE = 1  # the row yields a token: every decode row, and the prompt's last chunk
    SCORE = 2  # of a prefill row: log-probabilities of its ids are wanted; then of every chunk of the prompt, from its start on


class SlotFlag(IntFlag):
    IGNORE_EOS = 1  # stop ids still end the row
    PENALTIES = 2  # presence, frequency and repetition count
    BIASES = 4  # the same plan brings them
    LOGPROBS = 8  # log-probabilities of its tokens are wanted


# What a slot starts with; everything else of the slot is reset. 128 bytes, all of 4-byte fields, so that a device can read it as int32.
ADMISSION = np.dtype(
    [
        ("slot", "<i4"),
        ("epoch", "<i4"),  # of this use of the slot
        ("flags", "<i4"),  # see SlotFlag
        ("min_length", "<i4"),  # while the row has fewer tokens, prompt included, no EOS and no stop id is sampled
        ("max_length", "<i4"),  # tokens, prompt included; the row is done when it has them
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("temperature", "<f4"),  # 0 is greedy
        ("top_k", "<i4"),  # 0 is off
        ("top_p", "<f4"),  # 1 is off
        ("min_p", "<f4"),  # 0 is off
        ("presence", "<f4"),  # 0 is off; this and the next two are read with SlotFlag.PENALTIES only
        ("frequency", "<f4"),  # 0 is off
        ("repetition", "<f4"),  # 1 is off
        ("prompt_length", "<i4"),  # tokens; what follows was generated, here or before the request came to this slot
        ("reserved", "<i4", (1,)),
        ("stop_ids", "<i4", (MAX_STOP_IDS,)),  # NO_STOP_ID where unused
    ]
)
ADMISSION_SIZE = ADMISSION.itemsize // 4


_NO_IDS = np.empty(0, dtype=np.int32)
_NO_ADMISSIONS = np.empty(0, dtype=ADMISSION)


def _no_ids() -> Int32s:
    """The same one for all: nobody writes to an array without entries."""
    return _NO_IDS


@dataclass(slots=True)
class Plan:
    """One step, or a burst of `iterations` decode steps. All arrays are int32; see the module for their meaning."""

    plan_id: int
    iterations: int = 1
    estimate_us: int = 0
    flags: PlanFlag = NO_FLAGS
    decode_slots: Int32s = field(default_factory=_no_ids)
    decode_flags: Int32s = field(default_factory=_no_ids)
    prefill_slots: Int32s = field(default_factory=_no_ids)
    prefill_starts: Int32s = field(default_factory=_no_ids)
    prefill_lengths: Int32s = field(default_factory=_no_ids)
    prefill_flags: Int32s = field(default_factory=_no_ids)
    prefill_ids: Int32s = field(default_factory=_no_ids)
    grant_slots: Int32s = field(default_factory=_no_ids)
    grant_indexes: Int32s = field(default_factory=_no_ids)
    grant_pages: Int32s = field(default_factory=_no_ids)
    release_slots: Int32s = field(default_factory=_no_ids)
    bias_slots: Int32s = field(default_factory=_no_ids)
    bias_indexes: Int32s = field(default_factory=_no_ids)
    bias_ids: Int32s = field(default_factory=_no_ids)
    bias_values: Int32s = field(default_factory=_no_ids)  # the bits of float32
    admissions: NDArray[np.void] = field(default_factory=lambda: _NO_ADMISSIONS)

    @property
    def rows(self) -> int:
        return len(self.decode_slots) + len(self.prefill_slots)

    @property
    def row_slots(self) -> Int32s:
        return np.concatenate((self.decode_slots, self.prefill_slots))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))


# The sections after the header and before the admissions, in order: attribute of Plan, header field that counts it.
SECTIONS = (
    ("decode_slots", Header.DECODE_ROWS),
    ("decode_flags", Header.DECODE_ROWS),
    ("prefill_slots", Header.PREFILL_ROWS),
    ("prefill_starts", Header.PREFILL_ROWS),
    ("prefill_lengths", Header.PREFILL_ROWS),
    ("prefill_flags", Header.PREFILL_ROWS),
    ("prefill_ids", Header.PREFILL_IDS),
    ("grant_slots", Header.GRANTS),
    ("grant_indexes", Header.GRANTS),
    ("grant_pages", Header.GRANTS),
    ("release_slots", Header.RELEASES),
    ("bias_slots", Header.BIASES),
    ("bias_indexes", Header.BIASES),
    ("bias_ids", Header.BIASES),
    ("bias_values", Header.BIASES),
)


_HEADER_START = struct.Struct("<2iI")  # up to and with the checksum
_HEADER_REST = struct.Struct("<q11i")  # plan id first
_INT32 = np.dtype("<i4")
_section_arrays = attrgetter(*(name for name, _ in SECTIONS))
_section_counts = itemgetter(*(int(count) for _, count in SECTIONS))  # of a header as a list
_FIRST_COMPANION = [[other for _, other in SECTIONS].index(count) for _, count in SECTIONS]  # of each section


def encode(plan: Plan) -> bytes:
    """The bytes of a plan. Raises PlanError when arrays that belong together differ in length or the plan is too large."""
    sections = _section_arrays(plan)
    lengths = list(map(len, sections))
    for (name, _), length, first in zip(SECTIONS, lengths, _FIRST_COMPANION, strict=True):
        if length != lengths[first]:
            raise PlanError(f"{name} has {length} entries where its companions have {lengths[first]}")
    size = HEADER_SIZE + sum(lengths) + len(plan.admissions) * ADMISSION_SIZE
    if size * 4 > MAX_PLAN_BYTES:
        raise PlanError(f"a plan of {size * 4} bytes is larger than {MAX_PLAN_BYTES}: send fewer prefill tokens or admissions")
    parts = [np.ascontiguousarray(values, _INT32).data for values, length in zip(sections, lengths, strict=True) if length]
    if len(plan.admissions):
        parts.append(plan.admissions.view(_INT32).data)
    rest = _HEADER_REST.pack(
        plan.plan_id,
        plan.flags,
        plan.iterations,
        min(plan.estimate_us, 2**31 - 1),
        len(plan.decode_slots),
        len(plan.prefill_slots),
        len(plan.prefill_ids),
        len(plan.grant_slots),
        len(plan.release_slots),
        len(plan.admissions),
        0,  # masks
        len(plan.bias_slots),
    )
    checksum = crc32(rest)
    for part in parts:
        checksum = crc32(part, checksum)
    return b"".join((_HEADER_START.pack(VERSION, size, checksum), rest, *parts))


def decode(data: bytes | memoryview, *, again: bool = False) -> Plan:
    """The plan in `data`; its arrays are views. Raises PlanError on bytes that are not a whole, undamaged plan of this version.

    again: they were decoded on this host before, so the checksum need not be computed anew.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise PlanError(f"a plan has at most {MAX_PLAN_BYTES} bytes, got {len(data)}")
    if len(data) % 4 or len(data) < HEADER_SIZE * 4:
        raise PlanError(f"a plan is whole int32 numbers and has at least {HEADER_SIZE}, got {len(data)} bytes")
    words = np.frombuffer(data, dtype="<i4")
    header = words[:HEADER_SIZE].tolist()
    if header[Header.VERSION] != VERSION:
        raise PlanError(f"plan version {header[Header.VERSION]}, this worker reads {VERSION}")
    if header[Header.SIZE] != len(words):
        raise PlanError(f"the plan says that it has {header[Header.SIZE]} int32 numbers, got {len(words)}: truncated?")
    if not again and header[Header.CHECKSUM] & 0xFFFFFFFF != crc32(words[Header.CHECKSUM + 1 :].data):
        raise PlanError("the plan's checksum does not match its content")
    counts, admissions = _section_counts(header), header[Header.ADMISSIONS]
    if min(*counts, admissions) < 0 or HEADER_SIZE + sum(counts) + admissions * ADMISSION_SIZE != len(words):
        raise PlanError("the plan's counts do not add up to its size")
    if header[Header.MASKS]:
        raise PlanError("the plan uses fields that version 1 reserves")
    plan = Plan(
        plan_id=header[Header.PLAN_HIGH] << 32 | header[Header.PLAN_LOW] & 0xFFFFFFFF,
        iterations=header[Header.ITERATIONS],
        estimate_us=header[Header.ESTIMATE_US],
        flags=PlanFlag(header[Header.FLAGS]),
    )
    at = HEADER_SIZE
    for (name, _), count in zip(SECTIONS, counts, strict=True):
        setattr(plan, name, words[at : at + count])
        at += count
    plan.admissions = words[at:].view(ADMISSION)
    return plan


@dataclass(frozen=True)
class Limits:
    """What a group can execute; ids and indexes are below these numbers."""

    slots: int
    pages: int
    page_size: int
    max_length: int
    max_step_tokens: int
    vocab_size: int

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_length // self.page_size)


# Plain: enums take microseconds to combine, and numpy ten times as long with one.
_JUMP, _SAMPLE = int(PlanFlag.JUMP), int(RowFlag.SAMPLE)
_MOST_ROW_FLAGS, _MOST_SLOT_FLAGS = int(RowFlag.SAMPLE | RowFlag.SCORE), 2 * int(SlotFlag.LOGPROBS) - 1
_PENALTIES = int(SlotFlag.PENALTIES)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def check(plan: Plan, limits: Limits) -> None:
    """Raises PlanError naming the first thing in the plan that the group could not execute safely. Whole arrays at a time."""
    flags = int(plan.flags)
    unknown = flags & ~_JUMP
    if unknown:
        raise PlanError(f"unknown plan flags {unknown:#x}")
    if plan.plan_id < 0 or plan.estimate_us < 0:
        raise PlanError(f"plan id {plan.plan_id} and estimate {plan.estimate_us} us must not be negative")
    if not 1 <= plan.iterations <= MAX_BURST:
        raise PlanError(f"iterations must be from 1 to {MAX_BURST}, got {plan.iterations}")
    if plan.iterations > 1 and len(plan.prefill_slots):
        raise PlanError("a plan with prefill rows has one iteration")
    if flags & _JUMP and (len(plan.decode_slots) or not len(plan.prefill_slots)):
        raise PlanError("a plan that jumps has prefill rows only")
    for name, values, low, high in (
        ("decode slot", plan.decode_slots, 0, limits.slots),
        ("prefill slot", plan.prefill_slots, 0, limits.slots),
        ("prefill start", plan.prefill_starts, 0, limits.max_length),
        ("prefill length", plan.prefill_lengths, 1, limits.max_length + 1),
        ("prefill id", plan.prefill_ids, 0, limits.vocab_size),
        ("grant slot", plan.grant_slots, 0, limits.slots),
        ("grant index", plan.grant_indexes, 0, limits.pages_per_slot),
        ("grant page", plan.grant_pages, SCRATCH_PAGE + 1, limits.pages),
        ("release slot", plan.release_slots, 0, limits.slots),
        ("row flag", plan.decode_flags, _SAMPLE, _SAMPLE + 1),
        ("row flag", plan.prefill_flags, 0, _MOST_ROW_FLAGS + 1),
    ):
        _check_range(name, values, low, high)
    if int(plan.prefill_lengths.sum(dtype=np.int64)) != len(plan.prefill_ids):
        raise PlanError(f"prefill lengths add up to {plan.prefill_lengths.sum(dtype=np.int64)}, there are {len(plan.prefill_ids)} ids")
    _check_range("end of a prefill chunk", plan.prefill_starts + plan.prefill_lengths, 1, limits.max_length + 1)
    tokens = len(plan.decode_slots) + len(plan.prefill_ids)
    if tokens > limits.max_step_tokens:
        raise PlanError(f"a step has at most {limits.max_step_tokens} tokens, got {tokens}")
    _check_distinct("row", plan.row_slots)
    if len(plan.admissions):
        _check_admissions(plan.admissions, limits)
    if len(plan.bias_slots):
        _check_range("bias slot", plan.bias_slots, 0, limits.slots)
        _check_range("bias index", plan.bias_indexes, 0, MAX_BIASES)
        _check_range("bias id", plan.bias_ids, 0, limits.vocab_size)
        _check_numbers("bias value", plan.bias_values.view(np.float32), -MAX_BIAS, MAX_BIAS)


def _check_admissions(admissions: NDArray[np.void], limits: Limits) -> None:
    for name, low, high in (
        ("slot", 0, limits.slots),
        ("max_length", 1, limits.max_length + 1),
        ("flags", 0, _MOST_SLOT_FLAGS + 1),
        ("prompt_length", 0, limits.max_length + 1),
        ("stop_ids", NO_STOP_ID, limits.vocab_size),
    ):
        _check_range(f"admission {name}", admissions[name], low, high)
    _check_distinct("admission", admissions["slot"])
    _check_numbers("admission temperature", admissions["temperature"], 0.0, _LARGEST_FLOAT)
    _check_numbers("admission top_p", admissions["top_p"], 0.0, 1.0)
    _check_numbers("admission min_p", admissions["min_p"], 0.0, 1.0)
    penalised = admissions[(admissions["flags"] & _PENALTIES) != 0]
    if len(penalised):
        _check_numbers("admission presence", penalised["presence"], -MAX_PENALTY, MAX_PENALTY)
        _check_numbers("admission frequency", penalised["frequency"], -MAX_PENALTY, MAX_PENALTY)
        _check_numbers("admission repetition", penalised["repetition"], 1 / MAX_REPETITION, MAX_REPETITION)


def _check_range(name: str, values: Int32s, low: int, high: int) -> None:
    """One look at the values: as unsigned numbers, those below `low` are beyond all others."""
    if values.size and int((values - low if low else values).view(np.uint32).max()) >= high - low:
        bad = values[(values < low) | (values >= high)].flat[0]
        raise PlanError(f"{name} must be from {low} to {high - 1}, got {bad}")


def _check_numbers(name: str, values: NDArray[np.float32], least: float, most: float) -> None:
    """values: at least one."""
    if not (least <= values.min() and values.max() <= most):  # nor is NaN, which the least is if there is one
        raise PlanError(f"{name} must be finite, from {least:g} to {most:g}")


def _check_distinct(what: str, slots: Int32s) -> None:
    """slots: of the group's range."""
    if len(slots) > 1 and np.bincount(slots).max() > 1:
        raise PlanError(f"a slot stands in more than one {what}")


def ids_to_bytes(ids: Int32s | list[int]) -> bytes:
    """Token ids as every wire carries them: little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> Int32s:
    """The inverse of `ids_to_bytes`, a view. Raises PlanError when the bytes are not whole int32 numbers."""
    _check_whole(data)
    return np.frombuffer(data, dtype="<i4")


def id_list(data: bytes) -> list[int]:
    """The same as numbers of Python, which of a few ids cost half as much as an array. Raises PlanError, too."""
    _check_whole(data)
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def _check_whole(data: bytes) -> None:
    if len(data) % 4:
        raise PlanError(f"token ids are whole int32 numbers, got {len(data)} bytes")
