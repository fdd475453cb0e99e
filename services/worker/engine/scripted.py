"""An engine that computes nothing: it plays token ids from a script, with the slots, pages and steps of a real one, without torch.

The script is a JSON file:

    {"step_s": 0.001,                                  time of every step
     "tokens_per_step": 3,                             only every third step takes that time, so that three tokens come together
     "default": {"ids": [5, 6, 7], "repeat": true},    played to every request, here over and over
     "by_seed": {"7": {"ids": [5, 6]},                 played to requests with this seed; after the ids comes EOS
                 "8": {"logits": [0.0, 1.5, 0.5]}}}    of the ids 0, 1, 2: sampled anew for each token, as the request asks

Logits go through the sampler of the real engine; only then is torch imported. Penalties and biases change nothing here. The
log-probabilities of ids are invented, those of logits theirs.
"""

import time
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.worker.distributed.sums import Sums
from services.worker.engine.interface import Facts, Landed, Memory, Progress, RankSpec
from services.worker.engine.invented import invented, invented_scores
from services.worker.weights.folder import ModelFolder
from shared.errors import ConfigError
from shared.protocol.logprobs import MAX_TOP_LOGPROBS, NO_TOP_ID, Logprobs
from shared.protocol.plan import ADMISSION, NO_TOKEN, Int32s, Plan, RowFlag, SlotFlag

Float32s = NDArray[np.float32]


class Play(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ids: list[int] = Field(default_factory=list)
    repeat: bool = False
    logits: list[float] = Field(default_factory=list)

    @model_validator(mode="after")
    def one_or_the_other(self) -> Self:
        if self.ids and self.logits:
            raise ValueError("a play has ids or logits, not both")
        return self

    def token(self, index: int, eos: int) -> int:
        """The completion's token number `index`."""
        if self.repeat and self.ids:
            return self.ids[index % len(self.ids)]
        return self.ids[index] if index < len(self.ids) else eos


class Script(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step_s: float = Field(default=0.0, ge=0)
    tokens_per_step: int = Field(default=1, ge=1)
    load_s: float = Field(default=0.0, ge=0, description="How long start-up takes.")
    default: Play = Field(default_factory=Play)
    by_seed: dict[int, Play] = Field(default_factory=dict)


def read_script(path: Path | None) -> Script:
    """The script of a file, or an empty one. Raises ConfigError naming the file."""
    if path is None:
        return Script()
    try:
        return Script.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"script: {path}: {' '.join(str(error).split())}") from error


class ScriptedEngine:
    def __init__(self, spec: RankSpec, progress: Progress) -> None:
        self.script = read_script(spec.script)
        folder = ModelFolder(spec.model, spec.load_format)
        progress("loading weights", 0.5)
        time.sleep(self.script.load_s)
        max_length = spec.max_model_len or int(folder.config["max_position_embeddings"])
        pages = spec.num_pages or spec.slots * -(-max_length // spec.page_size) + 1
        self.facts = Facts(pages, max_length, int(folder.config["vocab_size"]), folder.eos_ids)
        self.memory, self.sums = Memory(weights=0, kv_cache=0), Sums()
        self.length, self.begun, self.max_length, self.seed, self.done, self.ignore_eos = np.zeros((6, spec.slots), dtype=np.int64)
        self.stop_ids: list[frozenset[int]] = [frozenset()] * spec.slots
        self.sampling = np.zeros(spec.slots, dtype=ADMISSION)
        self.wants_logprobs = np.zeros(spec.slots, dtype=np.bool_)
        self.steps = 0

    def reset(self) -> None:
        self.done[:] = True

    def begin(self, plan: Plan, words: Int32s) -> "ScriptedStep":
        self.done[plan.release_slots] = True
        for admission in plan.admissions:
            slot = admission["slot"]
            self.length[slot] = self.begun[slot] = self.done[slot] = 0
            self.max_length[slot] = admission["max_length"]
            self.seed[slot] = (int(admission["seed_high"]) << 32 | int(admission["seed_low"])) - (int(admission["seed_high"]) >> 31 << 64)
            self.ignore_eos[slot] = bool(admission["flags"] & SlotFlag.IGNORE_EOS)
            self.stop_ids[slot] = frozenset(admission["stop_ids"].tolist())
            self.sampling[slot] = admission
            self.wants_logprobs[slot] = bool(admission["flags"] & SlotFlag.LOGPROBS)
        return ScriptedStep(self, plan)

    def play_of(self, slot: int) -> Play:
        return self.script.by_seed.get(int(self.seed[slot]), self.script.default)

    def play(self, slot: int) -> int:
        """The next token of a slot, whose `length` counts the tokens in the cache."""
        play = self.play_of(slot)
        if play.logits:
            token = sampled(play.logits, self.sampling[slot], int(self.seed[slot]), int(self.length[slot]))
        else:
            token = play.token(int(self.length[slot] - self.begun[slot]), self.facts.eos_ids[0])
        ended = (token in self.facts.eos_ids and not self.ignore_eos[slot]) or token in self.stop_ids[slot]
        self.done[slot] |= ended or self.length[slot] + 1 >= self.max_length[slot]
        return token


def of_logits(logits: list[float], token: int) -> tuple[float, Int32s, Float32s]:
    """The token's log-probability, and the likeliest ids with theirs."""
    values = np.array(logits, dtype=np.float32)
    values -= np.logaddexp.reduce(values)
    order = np.argsort(-values, kind="stable")[:MAX_TOP_LOGPROBS].astype(np.int32)
    missing = MAX_TOP_LOGPROBS - len(order)
    top_ids = np.pad(order, (0, missing), constant_values=NO_TOP_ID)
    return float(values[token]), top_ids, np.pad(values[order], (0, missing), constant_values=-np.inf)


def sampled(logits: list[float], admission: np.void, seed: int, position: int) -> int:
    """What the real sampler chooses for the token at `position`, by the admission's parameters."""
    import torch  # only who plays logits pays for it

    from kernels.sampling import sample

    def column(value: float | int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype)

    token = sample(
        torch.tensor([logits], dtype=torch.float32),
        column(float(admission["temperature"]), torch.float32),
        column(int(admission["top_k"]), torch.int32),
        column(float(admission["top_p"]), torch.float32),
        column(float(admission["min_p"]), torch.float32),
        column(seed, torch.int64),
        column(position, torch.int32),
    )
    return int(token)


class ScriptedStep:
    def __init__(self, engine: ScriptedEngine, plan: Plan) -> None:
        self.engine, self.plan = engine, plan

    def launch(self) -> Landed:
        engine, plan = self.engine, self.plan
        if engine.steps % engine.script.tokens_per_step == 0:
            time.sleep(engine.script.step_s)
        engine.steps += 1
        ids = []
        for slot in plan.decode_slots.tolist():
            if not engine.done[slot]:
                engine.length[slot] += 1
            ids.append(NO_TOKEN if engine.done[slot] else engine.play(slot))
        for slot, start, length, flags in zip(
            plan.prefill_slots.tolist(),
            plan.prefill_starts.tolist(),
            plan.prefill_lengths.tolist(),
            plan.prefill_flags.tolist(),
            strict=True,
        ):
            engine.length[slot] = engine.begun[slot] = start + length
            ids.append(engine.play(slot) if flags & RowFlag.SAMPLE and not engine.done[slot] else NO_TOKEN)
        result = np.array(ids, dtype=np.int32)
        return Landed(result, np.concatenate((self._logprobs(result), invented_scores(plan, engine.facts.vocab_size))))

    def _logprobs(self, ids: Int32s) -> Logprobs:
        """Of the rows that want them and have yielded a token."""
        engine, slots = self.engine, self.plan.row_slots
        rows = np.flatnonzero(engine.wants_logprobs[slots] & (ids >= 0)).astype(np.int32)
        records = invented(rows, engine.length[slots[rows]].astype(np.int32), ids[rows], engine.facts.vocab_size)
        for record, slot, token in zip(records, slots[rows].tolist(), ids[rows].tolist(), strict=True):
            if logits := engine.play_of(slot).logits:
                record["logprob"], record["top_ids"], record["top_logprobs"] = of_logits(logits, token)
        return records
