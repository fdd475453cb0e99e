"""The offline API: a model for as long as a block of Python lasts, without HTTP.

It is production without its gateway: worker and scheduler run as processes, prompts and tokens travel over the same gRPC.
"""

import contextlib
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.local.backend import Backend, ServiceEnded
from services.local.progress import StartupProgress
from services.local.prompts import InvalidPrompt, Prompt, Sampling, checked_ids, checked_text, submit
from services.local.service import Service
from services.local.session import Answer, Logprobs, OnProgress
from shared.errors import ConfigError
from shared.protocol.plan import Int32s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Setting = str | int | float | bool | Path | None


@dataclass(frozen=True)
class Completion:
    """What the model says to one prompt."""

    prompt_ids: Int32s  # [prompt tokens]
    ids: Int32s  # [tokens], a stop token included
    text: str | None  # None where the prompt was given as ids
    finish_reason: Literal["stop", "length"]
    cached_tokens: int  # of the prompt, that were not computed anew
    logprobs: Logprobs | None  # where the sampling asks for them
    prompt_logprobs: Logprobs | None  # of all tokens of the prompt but the first


class LLM:
    """A model served to this process alone, until `close` or the end of its block.

    `generate` blocks; several threads that call it take turns. What breaks raises a LockstepError that says what to do.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        groups: int = 1,
        tensor_parallel_size: int = 1,
        progress: bool = True,
        logs: str | Path | None = None,
        **settings: Setting,
    ) -> None:
        """Starts the model and returns when it can compute.

        model: a folder in Hugging Face's layout; with `load_format="random"` it needs no tokenizer, prompts are ids then. groups: copies
        of the model, each of `tensor_parallel_size` ranks. progress: shows bars on a terminal, lines elsewhere. logs: a folder in which
        the processes' logs stay; None: they are kept only when something breaks. settings: the worker's, as
        `python -m services.worker --help` lists them, with underscores. Raises ConfigError for what does not fit.
        """
        if groups < 1:
            raise ConfigError(f"groups: at least 1, got {groups}")
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=not progress)
        arguments = ["--tensor-parallel-size", str(tensor_parallel_size)]
        for name, value in settings.items():
            if value is not None:
                arguments.append(f"--{name.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}")
        with StartupProgress(self._console) as shown:
            folder = None if logs is None else Path(logs)
            self._service = Service(Backend(Path(model), groups, tensor_parallel_size, arguments, folder), shown)
        self._finalizer = weakref.finalize(self, self._service.close)  # also when the interpreter ends
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; once is enough, more do no harm."""
        self._finalizer()

    @property
    def _open(self) -> Service:
        if not self._finalizer.alive:
            raise ServiceEnded("this LLM was closed: make a new one")
        if not self._service.is_own:
            raise ServiceEnded("this LLM belongs to the process that forked this one: make a new one here")
        return self._service

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self._service.description.vocab_size

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self._service.description.max_length

    @property
    def slots(self) -> int:
        """Prompts that are computed at a time, all groups together."""
        return self._service.slots

    @property
    def admin_ports(self) -> dict[str, int]:
        """Where metrics are on the loopback: of `scheduler`, and of `worker` or, with several groups, of `worker-0` and so on."""
        return dict(self._service.backend.admin_ports)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The model's, as transformers has it, with its chat template. Raises ConfigError for a model without, or with an unusable one."""
        from shared.tokenizer import load_tokenizer  # seconds that prompts of ids do not need

        found = self._open.run(self._open.files())
        if not any(file.name == "tokenizer.json" for file in found):
            raise ConfigError("the model has no tokenizer.json: give prompts as token ids")
        with tempfile.TemporaryDirectory(prefix="lockstep-files-") as folder:
            for file in found:
                (Path(folder) / file.name).write_bytes(file.data)
            return load_tokenizer(Path(folder))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None) -> list[Completion]:
        """One completion for each prompt, in their order; any number of prompts, texts and lists of ids mixed.

        sampling: one for all, or one for each. Raises InvalidPrompt before anything is computed; RequestFailed, PeerLost or ServiceEnded
        when something breaks, and then gives up the whole call. Ctrl-C does too; the model can be asked again after it.
        """
        service = self._open
        if isinstance(prompts, str):
            raise InvalidPrompt("prompts: a list of them, got one text; write [text]")
        wanted = [sampling or Sampling()] * len(prompts) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
        if len(wanted) != len(prompts):
            raise InvalidPrompt(f"sampling: one for all prompts or one for each, got {len(wanted)} for {len(prompts)} prompts")
        ids = [self._checked(index, prompt) for index, prompt in enumerate(prompts)]
        submits = [submit(index, each, its, self.max_length) for index, (each, its) in enumerate(zip(ids, wanted, strict=True))]
        with self._turn, self._bar(len(prompts)) as on_progress:
            answers = service.run(service.session.complete(submits, on_progress))
        return [self._completion(*each) for each in zip(prompts, ids, wanted, answers, strict=True)]

    def _checked(self, index: int, prompt: Prompt) -> Int32s:
        """The prompt's ids. Raises InvalidPrompt."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.backend_tokenizer.encode(checked_text(index, prompt)).ids
        return checked_ids(index, prompt, self.vocab_size)

    def _completion(self, prompt: Prompt, prompt_ids: Int32s, sampling: Sampling, answer: Answer) -> Completion:
        assert answer.finish_reason is not None, "the session returns only answers that have ended"
        ids = np.array(answer.ids, dtype=np.int32)
        return Completion(
            prompt_ids=prompt_ids,
            ids=ids,
            text=str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)) if isinstance(prompt, str) else None,
            finish_reason=answer.finish_reason,
            cached_tokens=answer.cached_tokens,
            logprobs=_joined(answer.logprobs, sampling.logprobs),
            prompt_logprobs=_joined(answer.prompt_logprobs, sampling.prompt_logprobs),
        )

    @contextlib.contextmanager
    def _bar(self, prompts: int) -> Iterator[OnProgress]:
        if not self._console.is_terminal:
            yield lambda ended, tokens: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task("generating", total=prompts, rate="")

            def on_progress(ended: int, tokens: int) -> None:
                elapsed_s = bar.tasks[0].elapsed or 0.0
                bar.update(task, completed=ended, rate=f"{tokens / elapsed_s:,.0f} tokens/s" if elapsed_s else "")

            yield on_progress


def _joined(runs: list[Logprobs], top: int | None) -> Logprobs | None:
    """Of all runs of one answer, which may be none."""
    if top is None:
        return None
    if not runs:
        return Logprobs(np.empty(0, np.float32), np.empty((0, top), np.int32), np.empty((0, top), np.float32))
    return Logprobs(*(np.concatenate([getattr(run, name) for run in runs]) for name in ("values", "top_ids", "top_values")))
