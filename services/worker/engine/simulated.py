"""An engine that keeps a GPU's timing and computes only what tests can check: the next token is a function of the ids before it.

Like keys and values, a hash of the sequence so far is kept in pages, one a position. So whoever writes into another's page, or
matches a prefix that is not there, changes the answer. No torch here, and no clock: a step says how long it takes.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.invented import invented, invented_scores
from services.worker.engine.roofline import Roofline
from services.worker.weights.folder import ModelFolder
from shared.protocol.logprobs import Logprobs
from shared.protocol.plan import MAX_STOP_IDS, NO_STOP_ID, NO_TOKEN, SCRATCH_PAGE, Int32s, Limits, Plan, RowFlag, SlotFlag

UInt64s = NDArray[np.uint64]

_FACTOR = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_POWERS_BLOCK = 4096
_FORWARD, _BACKWARD = (
    np.array([pow(base, exponent, 1 << 64) for exponent in range(_POWERS_BLOCK + 1)], dtype=np.uint64) for base in (_FACTOR, _INVERSE)
)


def absorb(state: int, ids: Int32s) -> UInt64s:
    """The hash after each of `ids` `[n]` -> `[n]`, when it was `state` before: h = h * FACTOR + id + 1, modulo 2**64."""
    states = np.empty(len(ids), dtype=np.uint64)
    for at in range(0, len(ids), _POWERS_BLOCK):
        block = ids[at : at + _POWERS_BLOCK].astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(block * _BACKWARD[1 : len(block) + 1]) + np.uint64(state)
        states[at : at + len(block)] = sums * _FORWARD[1 : len(block) + 1]
        state = int(states[at + len(block) - 1])
    return states


def _mixed(states: UInt64s, salt: int) -> UInt64s:
    """Well spread bits of each hash."""
    mixed = (states ^ (states >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9 + 2 * salt)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(32))


@dataclass(frozen=True)
class Language:
    """Which token follows."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    mean_tokens: int = 300  # of a completion that may end when it likes; 0: it never ends by itself

    def next_tokens(self, states: UInt64s, may_end: NDArray[np.bool_]) -> Int32s:
        """states: hashes of the sequences `[rows]` -> ids `[rows]`; EOS only where it may be, once in `mean_tokens` there."""
        tokens = (_mixed(states, 0) % np.uint64(self.vocab_size)).astype(np.int32)
        while (is_eos := np.isin(tokens, self.eos_ids)).any() and len(self.eos_ids) < self.vocab_size:
            tokens = np.where(is_eos, (tokens + 1) % self.vocab_size, tokens)
        if self.mean_tokens and self.eos_ids:
            ends = may_end & (_mixed(states, 1) % np.uint64(self.mean_tokens) == 0)
            tokens[ends] = self.eos_ids[0]
        return tokens

    def completion(self, prompt: list[int], max_tokens: int, min_tokens: int = 0, ignore_eos: bool = False) -> list[int]:
        """What a request without stop ids gets."""
        state, ids = int(absorb(0, np.array(prompt, dtype=np.int32))[-1]), list[int]()
        while len(ids) < max_tokens and not (ids and ids[-1] in self.eos_ids):
            may_end = np.array([not ignore_eos and len(ids) >= min_tokens])
            ids.append(int(self.next_tokens(np.array([state], dtype=np.uint64), may_end)[0]))
            state = int(absorb(state, np.array(ids[-1:], dtype=np.int32))[0])
        return ids


class SimulatedDevice:
    """The slots and the paged cache of one group; executes what a plan says and trusts the supervisor's checks."""

    def __init__(self, limits: Limits, language: Language, roofline: Roofline) -> None:
        self.limits, self.language, self.roofline = limits, language, roofline
        slots = limits.slots
        self.cache = np.zeros((limits.pages, limits.page_size), dtype=np.uint64)
        self.page_table = np.full((slots, limits.pages_per_slot), SCRATCH_PAGE, dtype=np.int32)
        self.length, self.min_length, self.max_length = np.zeros((3, slots), dtype=np.int64)
        self.last_token = np.zeros(slots, dtype=np.int32)
        self.stop_ids = np.full((slots, MAX_STOP_IDS), NO_STOP_ID, dtype=np.int32)
        self.ignore_eos, self.wants_logprobs = np.zeros((2, slots), dtype=np.bool_)
        self.done = np.ones(slots, dtype=np.bool_)

    def reset(self) -> None:
        self.done[:] = True

    def begin(self, plan: Plan) -> "SimulatedStep":
        """Applies releases, admissions and grants, in this order."""
        self.done[plan.release_slots] = True
        if len(plan.admissions):
            records = plan.admissions
            slots = records["slot"]
            self.page_table[slots] = SCRATCH_PAGE
            self.length[slots] = 0
            self.done[slots] = False
            self.min_length[slots], self.max_length[slots] = records["min_length"], records["max_length"]
            self.ignore_eos[slots] = records["flags"] & SlotFlag.IGNORE_EOS
            self.wants_logprobs[slots] = records["flags"] & SlotFlag.LOGPROBS
            self.stop_ids[slots] = records["stop_ids"]
        self.page_table[plan.grant_slots, plan.grant_indexes] = plan.grant_pages
        return SimulatedStep(self, plan)

    def decode(self, rows: Int32s) -> Int32s:
        """rows: slots `[D]` -> ids `[D]`, NO_TOKEN where the slot is done."""
        ids = np.full(len(rows), NO_TOKEN, dtype=np.int32)
        live = ~self.done[rows]
        slots = rows[live]
        positions = self.length[slots]
        before = self._read(slots, positions - 1)
        states = before * np.uint64(_FACTOR) + self.last_token[slots].astype(np.uint64) + np.uint64(1)
        self._write(slots, positions, states)
        self.length[slots] += 1
        ids[live] = self._sample(slots, states)
        return ids

    def prefill(self, slot: int, start: int, ids: Int32s, sample: bool) -> int:
        """One chunk. What lies before `start` is in the slot's pages, whoever wrote them."""
        if self.done[slot]:  # released before its prefill was over
            return NO_TOKEN
        before = int(self._read(np.array([slot]), np.array([start - 1]))[0]) if start else 0
        states = absorb(before, ids)
        positions = np.arange(start, start + len(ids))
        self._write(np.full(len(ids), slot), positions, states)
        self.length[slot] = start + len(ids)
        return int(self._sample(np.array([slot]), states[-1:])[0]) if sample else NO_TOKEN

    def _sample(self, slots: NDArray[np.integer], states: UInt64s) -> Int32s:
        length = self.length[slots] + 1  # with the token that is sampled
        tokens = self.language.next_tokens(states, ~self.ignore_eos[slots] & (length > self.min_length[slots]))
        ends = np.isin(tokens, self.language.eos_ids) & ~self.ignore_eos[slots] | (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        self.last_token[slots] = tokens
        self.done[slots] = ends & (length > self.min_length[slots]) | (length >= self.max_length[slots])
        return tokens

    def _read(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> UInt64s:
        size = self.limits.page_size
        states: UInt64s = self.cache[self.page_table[slots, positions // size], positions % size]
        return states

    def _write(self, slots: NDArray[np.integer], positions: NDArray[np.integer], states: UInt64s) -> None:
        size = self.limits.page_size
        self.cache[self.page_table[slots, positions // size], positions % size] = states


class SimulatedStep:
    def __init__(self, device: SimulatedDevice, plan: Plan) -> None:
        self.device, self.plan = device, plan

    def run(self) -> tuple[Int32s, int]:
        """One iteration -> ids `[rows]`, and its time in microseconds."""
        device, plan = self.device, self.plan
        us = self._us()
        ids = device.decode(plan.decode_slots)
        if not len(plan.prefill_slots):
            return ids, us
        ends = np.cumsum(plan.prefill_lengths).tolist()
        tokens = [
            device.prefill(slot, start, plan.prefill_ids[end - length : end], bool(flags & RowFlag.SAMPLE))
            for slot, start, length, end, flags in zip(
                plan.prefill_slots.tolist(),
                plan.prefill_starts.tolist(),
                plan.prefill_lengths.tolist(),
                ends,
                plan.prefill_flags.tolist(),
                strict=True,
            )
        ]
        return np.concatenate((ids, np.array(tokens, dtype=np.int32))), us

    def logprobs(self, ids: Int32s) -> Logprobs:
        """Of what `run` has just brought."""
        device, plan = self.device, self.plan
        vocab_size, slots = device.language.vocab_size, plan.row_slots
        rows = np.flatnonzero(device.wants_logprobs[slots] & (ids >= 0)).astype(np.int32)
        tokens = invented(rows, device.length[slots[rows]].astype(np.int32), ids[rows], vocab_size)
        return np.concatenate((tokens, invented_scores(plan, vocab_size)))

    def _us(self) -> int:
        """A graph computes every row, those that are done too; these read no context."""
        device, plan = self.device, self.plan
        decode_context = int(device.length[plan.decode_slots].sum(where=~device.done[plan.decode_slots]))
        starts, lengths = plan.prefill_starts.astype(np.int64), plan.prefill_lengths.astype(np.int64)
        attended = decode_context + int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        sampled = len(plan.decode_slots) + int(np.count_nonzero(plan.prefill_flags & RowFlag.SAMPLE))
        tokens = len(plan.decode_slots) + len(plan.prefill_ids)
        return device.roofline.step_us(tokens, sampled, decode_context + int((starts + lengths).sum()), attended)


def fingerprint(folder: ModelFolder, language: Language) -> str:
    """Of what these tokens depend on; the folder needs no weights."""
    files = {file.name: file.sha256 for file in folder.text_files}
    content = ["simulated", folder.config, files, language.mean_tokens]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
