"""The plan codec: what goes in comes out, and nothing damaged or out of range gets through."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.plan import (
    ADMISSION,
    HEADER_SIZE,
    MAX_PLAN_BYTES,
    SECTIONS,
    Header,
    Limits,
    Plan,
    PlanError,
    PlanFlag,
    SlotFlag,
    check,
    decode,
    encode,
    id_list,
    ids_from_bytes,
    ids_to_bytes,
)

LIMITS = Limits(slots=8, pages=20, page_size=4, max_length=32, max_step_tokens=64, vocab_size=100)

any_int32 = st.integers(-(2**31), 2**31 - 1)


def int32s(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that can be written down, sensible or not."""
    counts = {count: draw(st.integers(0, 5)) for _, count in SECTIONS}
    sections = {name: int32s(draw(st.lists(any_int32, min_size=counts[count], max_size=counts[count]))) for name, count in SECTIONS}
    words = draw(st.lists(any_int32, min_size=0, max_size=2 * ADMISSION.itemsize // 4))
    admissions = int32s(words[: len(words) // (ADMISSION.itemsize // 4) * (ADMISSION.itemsize // 4)]).view(ADMISSION)
    return Plan(
        plan_id=draw(st.integers(-(2**63), 2**63 - 1)),
        iterations=draw(any_int32),
        estimate_us=draw(st.integers(0, 2**31 - 1)),
        flags=PlanFlag(draw(st.integers(0, 3))),
        admissions=admissions,
        **sections,
    )


def admission(**values: Any) -> np.ndarray:
    record = np.zeros(1, dtype=ADMISSION)
    record["max_length"], record["top_p"], record["stop_ids"] = 8, 1.0, -1
    for name, value in values.items():
        record[name] = value
    return record


def good_plan() -> Plan:
    return Plan(
        plan_id=7,
        decode_slots=int32s([0, 5]),
        decode_flags=int32s([1, 1]),
        prefill_slots=int32s([3, 2]),
        prefill_starts=int32s([0, 8]),
        prefill_lengths=int32s([2, 3]),
        prefill_flags=int32s([1, 0]),
        prefill_ids=int32s([1, 2, 3, 4, 99]),
        grant_slots=int32s([3, 7]),
        grant_indexes=int32s([0, 7]),
        grant_pages=int32s([1, 19]),
        release_slots=int32s([6]),
        bias_slots=int32s([3, 3]),
        bias_indexes=int32s([0, 299]),
        bias_ids=int32s([0, 99]),
        bias_values=np.array([-100, 0.5], dtype=np.float32).view(np.int32),
        admissions=admission(slot=3, flags=SlotFlag.BIASES),
    )


def words_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<i4").copy()


@given(plans())
def test_round_trip(plan: Plan) -> None:
    data = encode(plan)
    again = decode(data)
    assert encode(again) == data
    for name, _ in SECTIONS:
        np.testing.assert_array_equal(getattr(again, name), getattr(plan, name))
    assert (again.plan_id, again.iterations, again.estimate_us, again.flags) == (
        plan.plan_id,
        plan.iterations,
        plan.estimate_us,
        plan.flags,
    )
    assert again.admissions.tobytes() == plan.admissions.tobytes()


def test_decoded_arrays_are_views() -> None:
    data = encode(good_plan())
    plan = decode(data)
    assert all(np.shares_memory(np.frombuffer(data, dtype=np.uint8), getattr(plan, name)) for name, _ in SECTIONS)


@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    damaged = bytearray(encode(good_plan()))
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PlanError):
        decode(bytes(damaged))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(PlanError):
        decode(noise)


@pytest.mark.parametrize("size", [0, 4, HEADER_SIZE * 4 - 4, HEADER_SIZE * 4, -4, -1])
def test_truncated_plans_are_refused(size: int) -> None:
    with pytest.raises(PlanError):
        decode(encode(good_plan())[:size])


def test_another_version_is_refused_by_name() -> None:
    words = words_of(encode(good_plan()))
    words[Header.VERSION] = 2
    with pytest.raises(PlanError, match="plan version 2, this worker reads 1"):
        decode(words.tobytes())


def test_companion_arrays_of_other_lengths_are_refused() -> None:
    plan = good_plan()
    plan.grant_pages = int32s([1])
    with pytest.raises(PlanError, match="grant_"):
        encode(plan)


def test_a_plan_has_a_largest_size() -> None:
    ids = np.zeros(MAX_PLAN_BYTES // 4, dtype=np.int32)
    with pytest.raises(PlanError, match="larger than"):
        encode(Plan(1, prefill_ids=ids))
    with pytest.raises(PlanError, match="at most"):
        decode(bytes(MAX_PLAN_BYTES + 4))


def test_a_good_plan_passes() -> None:
    check(good_plan(), LIMITS)
    check(Plan(1, iterations=8, decode_slots=int32s([1]), decode_flags=int32s([1])), LIMITS)
    check(Plan(1, release_slots=int32s([1])), LIMITS)


BAD = {
    "decode slot must be from 0 to 7, got 8": {"decode_slots": [0, 8]},
    "decode slot must be from 0 to 7, got -1": {"decode_slots": [-1, 0]},
    "prefill slot must be": {"prefill_slots": [3, 8]},
    "prefill start must be": {"prefill_starts": [0, -1]},
    "prefill length must be from 1": {"prefill_lengths": [5, 0]},
    "prefill lengths add up to 6, there are 5 ids": {"prefill_lengths": [3, 3]},
    "end of a prefill chunk must be": {"prefill_starts": [0, 30]},
    "prefill id must be from 0 to 99, got 100": {"prefill_ids": [1, 2, 3, 4, 100]},
    "prefill id must be from 0 to 99, got -2": {"prefill_ids": [1, -2, 3, 4, 5]},
    "grant slot must be": {"grant_slots": [3, 8]},
    "grant index must be from 0 to 7, got 8": {"grant_indexes": [0, 8]},
    "grant page must be from 1 to 19, got 20": {"grant_pages": [1, 20]},
    "grant page must be from 1 to 19, got 0": {"grant_pages": [0, 1]},
    "release slot must be": {"release_slots": [8]},
    "a slot stands in more than one row": {"prefill_slots": [3, 5]},
    "row flag must be from 0 to 3, got 4": {"prefill_flags": [1, 4]},
    "row flag must be from 1 to 1, got 3": {"decode_flags": [1, 3]},
    "bias slot must be": {"bias_slots": [3, 8]},
    "bias index must be from 0 to 299, got 300": {"bias_indexes": [0, 300]},
    "bias id must be from 0 to 99, got 100": {"bias_ids": [0, 100]},
    "bias value must be finite, from -100 to 100": {"bias_values": [0, 0x7FC00000]},
}


@pytest.mark.parametrize("message", BAD)
def test_out_of_range_is_refused_and_named(message: str) -> None:
    plan = good_plan()
    for name, values in BAD[message].items():
        setattr(plan, name, int32s(values))
    with pytest.raises(PlanError, match=message):
        check(decode(encode(plan)), LIMITS)


@pytest.mark.parametrize(
    "values",
    [
        {"slot": 8},
        {"max_length": 0},
        {"max_length": 33},
        {"flags": 16},
        {"prompt_length": 33},
        {"flags": SlotFlag.PENALTIES, "presence": np.nan, "repetition": 1.0},
        {"flags": SlotFlag.PENALTIES, "presence": 2.5, "repetition": 1.0},
        {"flags": SlotFlag.PENALTIES, "frequency": -2.5, "repetition": 1.0},
        {"flags": SlotFlag.PENALTIES, "repetition": 0.0},
        {"flags": SlotFlag.PENALTIES, "repetition": np.inf},
        {"stop_ids": 100},
        {"temperature": -1.0},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"top_p": 1.5},
        {"min_p": -0.1},
    ],
)
def test_admissions_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        check(Plan(1, admissions=admission(**values)), LIMITS)


def test_bursts_are_bounded_and_have_no_prefill() -> None:
    decode_only: dict[str, Any] = {"decode_slots": int32s([1]), "decode_flags": int32s([1])}
    for iterations in (0, 9):
        with pytest.raises(PlanError, match="iterations must be from 1 to 8"):
            check(Plan(1, iterations=iterations, **decode_only), LIMITS)
    plan = good_plan()
    plan.iterations = 2
    with pytest.raises(PlanError, match="one iteration"):
        check(plan, LIMITS)


def test_only_prefill_jumps() -> None:
    plan = good_plan()
    plan.flags = PlanFlag.JUMP
    with pytest.raises(PlanError, match="prefill rows only"):
        check(plan, LIMITS)


def test_a_step_has_a_token_budget() -> None:
    ids = int32s([1] * 32)
    rows: dict[str, Any] = {"prefill_starts": int32s([0, 0, 0]), "prefill_lengths": int32s([32, 32, 1]), "prefill_flags": int32s([1, 1, 1])}
    plan = Plan(1, prefill_slots=int32s([0, 1, 2]), prefill_ids=np.concatenate((ids, ids, ids[:1])), **rows)
    with pytest.raises(PlanError, match="at most 64 tokens, got 65"):
        check(plan, LIMITS)


@given(st.lists(any_int32))
def test_token_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    data = ids_to_bytes(ids)
    assert data == b"".join(each.to_bytes(4, "little", signed=True) for each in ids)
    assert ids_from_bytes(data).tolist() == id_list(data) == ids


def test_half_a_token_id_is_refused() -> None:
    for read in (ids_from_bytes, id_list):
        with pytest.raises(PlanError):
            read(b"\0\0\0")
