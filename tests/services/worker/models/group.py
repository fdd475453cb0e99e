"""Groups of ranks that outlive a test: started once, given one checkpoint after the other."""

import multiprocessing
import os
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.driver import admission, int32s, spec
from services.worker.distributed.communicator import Communicator, communicator
from services.worker.distributed.rendezvous import CommunicatorKind
from services.worker.engine.engine import TorchEngine
from services.worker.engine.features import Feature
from services.worker.engine.logprobs import ids_of, records_of
from shared.errors import ConfigError
from shared.protocol.logprobs import NO_LOGPROBS, Logprobs
from shared.protocol.plan import Plan, decode, encode

DEADLINE_S = 100.0
START_S = 60.0
SLOTS = 8


@dataclass(frozen=True)
class Job:
    """Prompts to prefill together, in chunks, and then to decode together."""

    model: Path
    prompts: tuple[tuple[int, ...], ...]
    count: int = 1  # tokens for each
    chunk: int = 1000
    page_size: int = 16
    sampling: dict[str, Any] = field(default_factory=dict)  # the same for all but for the seed, which is the row
    spec: dict[str, Any] = field(default_factory=dict)  # changes of the RankSpec


@dataclass
class Outcome:
    tokens: npt.NDArray[np.int32]  # [prompts, count]
    logits: npt.NDArray[np.float32]  # [prompts, count, V]
    logprobs: Logprobs = field(default_factory=NO_LOGPROBS.copy)  # step after step, where the sampling asks for them


class Runner:
    """Runs jobs in this process, as one rank of `group`."""

    def __init__(self, group: Communicator | None) -> None:
        self.group = group
        self._engines: dict[str, TorchEngine] = {}

    def engine(self, job: Job) -> TorchEngine:
        key = f"{job.model} {job.page_size} {job.spec}"
        if key not in self._engines:
            place = {} if self.group is None else {"rank": self.group.rank, "ranks": self.group.size}
            ours = spec(
                job.model, slots=SLOTS, num_pages=SLOTS * 512 // job.page_size + SLOTS + 1, page_size=job.page_size, **{**job.spec, **place}
            )
            self._engines[key] = TorchEngine(ours, lambda phase, part: None, self.group)
        return self._engines[key]

    def run(self, job: Job) -> Outcome:
        engine, rows = self.engine(job), range(len(job.prompts))
        engine.reset()
        tokens: list[list[int]] = [[] for _ in rows]
        logits: list[list[npt.NDArray[np.float32]]] = [[] for _ in rows]
        logprobs: list[Logprobs] = []
        length = engine.facts.max_length
        pages = -(-length // job.page_size)  # of each slot, its own ones, none beside another
        changes: dict[str, Any] = {
            "admissions": np.concatenate([admission(row, length, **{"flags": 1, "seed_low": row, **job.sampling}) for row in rows]),
            "grant_slots": np.repeat(int32s(*rows), pages),
            "grant_indexes": np.tile(np.arange(pages, dtype=np.int32), len(rows)),
            "grant_pages": np.concatenate([1 + row + SLOTS * np.arange(pages, dtype=np.int32) for row in rows]),
        }

        def execute(plan: Plan, iterations: int, rows: list[int], lasts: list[bool]) -> None:
            words = np.frombuffer(bytearray(encode(plan)), dtype=np.int32)
            step = engine.begin(decode(words.data.cast("B")), words)
            for _ in range(iterations):
                batch, hidden = step.forward()
                whole = engine.sampler.score(hidden, None, Feature.LOGPROBS).wanted_logits  # of all rows and columns
                copy = whole.cpu().numpy().copy()
                result = step.choose(batch, hidden).cpu().numpy()
                logprobs.append(records_of(result, np.array(lasts)))
                for row, last, token, own in zip(rows, lasts, ids_of(result).tolist(), copy, strict=True):
                    if last:
                        tokens[row].append(token)
                        logits[row].append(own)

        for number, start in enumerate(range(0, max(len(prompt) for prompt in job.prompts), job.chunk), 1):
            parts = {row: prompt[start : start + job.chunk] for row, prompt in enumerate(job.prompts) if start < len(prompt)}
            lasts = [start + job.chunk >= len(job.prompts[row]) for row in parts]
            plan = Plan(
                number,
                prefill_slots=int32s(*parts),
                prefill_starts=np.full(len(parts), start, dtype=np.int32),
                prefill_lengths=int32s(*(len(part) for part in parts.values())),
                prefill_flags=int32s(*lasts),
                prefill_ids=int32s(*(token for part in parts.values() for token in part)),
                **changes,
            )
            execute(plan, 1, list(parts), lasts)
            changes = {}
        if job.count > 1:
            plan = Plan(10_000, decode_slots=int32s(*rows), decode_flags=int32s(*[1] * len(rows)), iterations=job.count - 1)
            execute(plan, job.count - 1, list(rows), [True] * len(rows))
        return Outcome(np.array(tokens, dtype=np.int32), np.array(logits, dtype=np.float32), np.concatenate(logprobs))


def _serve(rank: int, size: int, rendezvous: str, link: Connection, device: str, kind: CommunicatorKind) -> None:
    place = torch.device("cuda", rank) if device == "cuda" and kind != "gloo" else torch.device(device)
    if place.index is not None:
        torch.cuda.set_device(place)
    runner = Runner(communicator(rank, size, rendezvous, place, kind))
    link.send(None)
    while (job := link.recv()) is not None:
        try:
            outcome = runner.run(job)
            link.send(outcome if rank == 0 else Outcome(outcome.tokens, outcome.logits[:0], outcome.logprobs))
        except ConfigError as error:
            link.send(error)
    os._exit(0)  # gloo's threads may hold the interpreter back


class Group:
    """`size` processes, one a rank."""

    def __init__(self, size: int, folder: Path, device: str = "cpu", kind: CommunicatorKind = "gloo") -> None:
        """device: of all ranks; on GPUs they share one with gloo, and have one each with others."""
        context = multiprocessing.get_context("spawn")
        self.links, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, f"file://{folder / 'rendezvous'}", theirs, device, kind), daemon=True
            )
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)
        self._answers(START_S)

    def run(self, job: Job) -> list[Outcome]:
        """What every rank got; the logits of rank 0 only. Raises the ConfigError that all ranks raised."""
        for link in self.links:
            link.send(job)
        answers = self._answers(DEADLINE_S)
        if all(isinstance(answer, ConfigError) for answer in answers):
            raise answers[0]
        return answers

    def _answers(self, within_s: float) -> list[Any]:
        for rank, link in enumerate(self.links):
            assert link.poll(within_s), f"rank {rank} did not answer within {within_s} s"
        return [link.recv() for link in self.links]

    def close(self) -> None:
        for link in self.links:
            with suppress(BrokenPipeError):  # of a rank that has died, which its test has told
                link.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


class Local:
    """A group of one, in this process."""

    def __init__(self) -> None:
        self.runner = Runner(None)

    def run(self, job: Job) -> list[Outcome]:
        return [self.runner.run(job)]

    def close(self) -> None:
        pass
