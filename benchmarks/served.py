"""A model behind the offline API, started once and measured many times; what comes back is checked as it is timed."""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.ceilings import Ceilings
from benchmarks.peers import GPU, PEERS, PEERS_OF_TWO, Peers
from benchmarks.workload import Prompts, config_file
from services.local import LLM, Sampling
from services.worker.engine.roofline import Shape
from shared.errors import LockstepError

MAX_STEP_TOKENS = 16_384  # what the peers were given, as is the next
MAX_LENGTH = 9_216
CHECKED_ROWS, CHECKED_TOKENS = 4, 16
LEAST_AGREEMENT = 0.5  # of a row: near-ties fall either way in bfloat16, a wrong path agrees nowhere


class WrongOutput(LockstepError):
    """What was timed did not compute what it should."""


@dataclass(frozen=True)
class Options:
    """How models are started and for how long each is measured."""

    device: str = "auto"
    quick: bool = False  # fewer repeats
    limit_s: float = 480.0  # of one model, its start included; rows that do not fit are left out
    worker: dict[str, Any] = field(default_factory=dict)  # other settings of the worker
    logs: Path | None = None  # where those of each model's processes stay, in a folder of its name

    @property
    def device_type(self) -> str:
        """What the worker will compute on."""
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Steps:
    """What the worker has counted since its start."""

    decode_s: float  # of iterations without prefill rows, on the device, as the rank sees it; `decodes` is their number
    decodes: float
    prefill_s: float  # of those with
    prefills: float
    prefill_launch_s: float  # of these, in which the host launched
    busy_s: float  # of a group, on average


class Way(NamedTuple):
    """Seconds that a call of one group took until its last plan brought the last token, part by part."""

    to_scheduler: float  # from the call to the arrival of its requests
    before_plan: float  # until the scheduler made the plan
    to_rank: float  # making the plan, sending it, and until the rank reads it
    in_rank: float
    to_result: float  # from the end of the rank's work until the scheduler has it
    to_client: float  # what results bring to requests, sending it, and until the call returns

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {1e3 * seconds:.2f}" for name, seconds in self._asdict().items())


@dataclass
class Served:
    """`name` is a shape's or a folder's; `ceilings` are of this run, of all its GPUs together."""

    name: str
    llm: LLM
    shape: Shape
    ceilings: Ceilings
    gpu: str
    gpus: int
    deadline: float  # on the monotonic clock
    ranks: int = 1  # of a group
    traces: Path | None = None  # where ranks write them, when there are several or somebody asks for them
    span: tuple[float, float] = (0.0, 0.0)  # of the last call, on the monotonic clock

    @property
    def peers(self) -> Peers | None:
        """Other engines' figures for this model, where they can be compared: on as many GPUs, theirs."""
        return {1: PEERS, 2: PEERS_OF_TWO}.get(self.gpus, {}).get(self.name) if GPU in self.gpu else None

    @property
    def over(self) -> bool:
        """The time for this model is used up."""
        return time.monotonic() > self.deadline

    def timed(self, prompts: Prompts, max_tokens: int | Sequence[int], temperature: float = 0.0, **how: Any) -> float:
        """Seconds until all prompts have yielded so many tokens, from their submission; sampled as said. Raises WrongOutput for any other
        number."""
        wanted = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        sampling = [Sampling(tokens, temperature=temperature, ignore_eos=True, **how) for tokens in wanted]
        start = time.monotonic()
        completions = self.llm.generate(prompts, sampling)
        self.span = start, time.monotonic()
        for number, (completion, tokens) in enumerate(zip(completions, wanted, strict=True)):
            ids = completion.ids
            if len(ids) != tokens or ids.min() < 0 or ids.max() >= self.llm.vocab_size:
                raise WrongOutput(f"{self.name}: prompt {number} yielded {len(ids)} ids from {ids.min()} to {ids.max()}, not {tokens}")
        return self.span[1] - self.span[0]

    def way(self) -> Way | None:
        """Of the last call; None where several groups may have had its requests."""
        begin, end = self.span
        (requests, groups) = (_page(self.llm, "scheduler", f"debug/{name}").json() for name in ("requests", "groups"))
        if len(groups["groups"]) > 1:
            return None
        arrived = min((each["arrived_at_s"] for each in requests["ended"] if each["arrived_at_s"] > begin), default=begin)
        times = groups["groups"][0]["last_result"]
        marks = begin, arrived, *(times[name] for name in ("made_at_s", "began_at_s", "ended_at_s", "result_at_s")), end
        return Way(*(after - before for before, after in pairwise(marks)))

    def steps(self) -> Steps:
        """Of this moment, all groups together."""
        found = {"decode_s": 0.0, "decodes": 0.0, "prefill_s": 0.0, "prefills": 0.0, "prefill_launch_s": 0.0, "busy_s": 0.0}
        names = {
            ("lockstep_worker_step_seconds_sum", "decode"): "decode_s",
            ("lockstep_worker_step_seconds_count", "decode"): "decodes",
            ("lockstep_worker_step_seconds_sum", "prefill"): "prefill_s",
            ("lockstep_worker_step_seconds_count", "prefill"): "prefills",
            ("lockstep_worker_launch_seconds_sum", "prefill"): "prefill_launch_s",
            ("lockstep_worker_busy_seconds_total", None): "busy_s",
        }
        workers = [service for service in self.llm.admin_ports if service.startswith("worker")]
        for worker in workers:
            for sample in _samples(self.llm, worker):
                name = names.get((sample.name, sample.labels.get("kind")))
                if name is not None:
                    found[name] += sample.value
        found["busy_s"] /= len(workers)
        return Steps(**found)

    def check(self, prompts: Prompts) -> float:
        """The share of tokens that decoding, all prompts at a time, chooses as prefilling the same sequences does at the same places.

        Greedy, as it is timed, and sampled, since greedy rows of random weights soon repeat a token; the noise belongs to seed and
        position, so it is the same both times. Raises WrongOutput when a row agrees on less than LEAST_AGREEMENT.
        """
        shares = []
        rows = np.linspace(0, len(prompts) - 1, min(CHECKED_ROWS, len(prompts)), dtype=int).tolist()
        for temperature in (0.0, 1.0):

            def sampling(tokens: int, row: int, salt: str | None, temperature: float = temperature) -> Sampling:
                return Sampling(tokens, temperature=temperature, seed=row, ignore_eos=True, cache_salt=salt)

            decoded = self.llm.generate(prompts, [sampling(CHECKED_TOKENS + 1, row, None) for row in range(len(prompts))])
            places = [(row, token) for row in rows for token in range(1, CHECKED_TOKENS + 1)]
            # A salt of its own: pages that decoding wrote are what is checked.
            again = self.llm.generate(
                [[*prompts[row], *decoded[row].ids[:token].tolist()] for row, token in places],
                [sampling(1, row, "check") for row, _ in places],
            )
            equal = np.array([decoded[row].ids[token] == each.ids[0] for (row, token), each in zip(places, again, strict=True)])
            by_row = equal.reshape(len(rows), CHECKED_TOKENS).mean(axis=1)
            if by_row.min() < LEAST_AGREEMENT:
                how = f"at temperature {temperature:g}, decoding {len(prompts)} rows"
                raise WrongOutput(f"{self.name}: {how} and prefilling agree on {by_row} of a row's tokens")
            shares.append(float(equal.mean()))
        return min(shares)


def startup(llm: LLM) -> str:
    """What the start of the first worker took, by phase."""
    samples = _samples(llm, next(service for service in llm.admin_ports if service.startswith("worker")))
    seconds = {each.labels["phase"]: each.value for each in samples if each.name == "lockstep_worker_startup_seconds"}
    return f"{sum(seconds.values()):.1f} s: " + ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())


def _page(llm: LLM, service: str, page: str) -> httpx.Response:
    """Of an admin port."""
    return httpx.get(f"http://127.0.0.1:{llm.admin_ports[service]}/{page}", trust_env=False).raise_for_status()


def _samples(llm: LLM, service: str) -> list[Sample]:
    """Of all metrics."""
    return [sample for family in text_string_to_metric_families(_page(llm, service, "metrics").text) for sample in family.samples]


@contextlib.contextmanager
def served(model: str, options: Options, ceilings: Ceilings, gpu: str, rows: int, length: int, traced: bool = False) -> Iterator[Served]:
    """A shape by its name or a folder, with random weights, for up to `rows` requests of up to `length` tokens at a time."""
    start = time.monotonic()
    source = config_file(model)
    config = json.loads(source.read_text())
    settings = {
        "load_format": "random",
        "device": options.device,
        "max_num_seqs": rows,
        "max_step_tokens": MAX_STEP_TOKENS,
        "start_deadline_s": options.limit_s,
        "max_model_len": min(max(MAX_LENGTH, length), int(config["max_position_embeddings"])),
        **options.worker,
    }
    ranks = int(options.worker.get("tensor_parallel_size", 1))
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        traces = Path(folder) / "traces" if ranks > 1 or traced else None
        name = model if source.stem == model else Path(model).name
        logs = None if options.logs is None else options.logs / name
        with LLM(folder, logs=logs, **{"profile_folder": traces, **settings}) as llm:
            gpus, shape = ranks * int(options.worker.get("groups", 1)), Shape.from_config(config)
            print(f"{name} started: {startup(llm)}", flush=True)
            yield Served(name, llm, shape, ceilings.times(gpus), gpu, gpus, start + options.limit_s, ranks, traces)
