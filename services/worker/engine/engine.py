"""The engine that computes: a model, its KV cache and its slots on one rank's device."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.plan_unpack import plan_unpack
from services.worker.distributed.board import Mark
from services.worker.distributed.communicator import Communicator, communicator
from services.worker.engine.batch import Batch
from services.worker.engine.interface import Facts, Memory, Progress, RankSpec
from services.worker.engine.sampling import CandidateSampler, FullSampler, Sampler
from services.worker.engine.slots import Slots
from services.worker.kvcache import CacheShape, allocate
from services.worker.layers.backends import backends
from services.worker.layers.linear import head_share
from services.worker.models.decoder import Decoder
from services.worker.models.registry import describe
from services.worker.weights.folder import ModelFolder
from services.worker.weights.loader import load
from services.worker.weights.random_weights import randomise
from shared.errors import ConfigError
from shared.protocol.plan import ADMISSION_SIZE, HEADER_SIZE, SECTIONS, Int32s, Plan, RowFlag

logger = logging.getLogger(__name__)

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchEngine:
    """Executes plans in the order in which it is given them; every rank of a group does the same."""

    def __init__(self, spec: RankSpec, progress: Progress, group: Communicator | None = None) -> None:
        """group: the ranks that have met already; None: they meet at the spec's rendezvous."""
        # More threads would cut elementwise operations at places that depend on the batch, and the ends of a cut are rounded otherwise.
        torch.set_num_threads(1 if spec.deterministic else spec.threads)
        torch.set_grad_enabled(False)
        device = torch.device("cpu")
        mark = Mark(spec.board_fd, spec.rank)
        if group is None:
            progress("meeting the other ranks", 0.0)
            group = communicator(
                spec.rank,
                spec.ranks,
                spec.rendezvous,
                device,
                spec.communicator,
                spec.start_timeout_s,
                spec.step_timeout_s,
                mark,
            )

        folder = ModelFolder(spec.model, spec.load_format)
        cls, config, remarks = describe(folder.config, folder.tensors.keys())
        if group.rank == 0:
            for remark in remarks:
                logger.warning("%s", remark)
        max_length = spec.max_model_len or config.max_length
        if max_length > config.max_length:
            raise ConfigError(f"max_model_len: {max_length} is more than the model's {config.max_length} positions")
        dtype = DTYPES[spec.dtype]
        self.model = _built(lambda: cls(config, backends(group, device, spec.deterministic), max_length), dtype)
        shards = self.model.shards(folder.tensors.keys())
        if spec.load_format == "random":
            randomise(folder.config, shards, progress)
        else:
            load(folder, shards, progress, self.model.ignores)

        progress("allocating the KV cache", 0.0)
        shape = CacheShape(config.layers, spec.page_size, len(head_share(config.kv_heads, group)), config.head_dim, dtype)
        pages_per_slot = -(-max_length // spec.page_size)
        fitting = min(spec.kv_cache_memory_bytes // shape.page_bytes, spec.slots * pages_per_slot + 1)
        pages = group.minimum(spec.num_pages or fitting)
        if pages < 2:
            raise ConfigError(f"kv_cache_memory_bytes: {spec.kv_cache_memory_bytes} hold no two pages of {shape.page_bytes} bytes")
        self.caches = allocate(shape, pages, device)
        self.page_size = spec.page_size
        eos_ids = torch.tensor(folder.eos_ids, dtype=torch.int32, device=device)
        head = self.model.head
        self.sampler: Sampler = CandidateSampler(head, mark) if spec.sampling_gather == "candidates" else FullSampler(head)
        self.slots = Slots(spec.slots, pages_per_slot, eos_ids)
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        self.memory = Memory(weights, kv_cache=pages * shape.page_bytes)
        self.facts = Facts(pages, max_length, config.vocab_size, folder.eos_ids)

    def reset(self) -> None:
        self.slots.reset()

    def begin(self, plan: Plan, words: Int32s) -> "TorchStep":
        device_words = torch.from_numpy(words).to(self.slots.done.device)  # the plan's one copy to the device
        sections: dict[str, Tensor] = {}
        at = HEADER_SIZE
        for name, _ in SECTIONS:
            sections[name] = device_words[at : at + len(getattr(plan, name))]
            at += len(sections[name])
        if len(plan.release_slots):
            self.slots.release(sections["release_slots"])
        if len(plan.admissions):
            self.slots.admit(device_words[at:].view(-1, ADMISSION_SIZE))
        if len(plan.grant_slots):
            self.slots.grant(sections["grant_slots"], sections["grant_indexes"], sections["grant_pages"])
        return TorchStep(self, plan, sections)


class TorchStep:
    def __init__(self, engine: TorchEngine, plan: Plan, sections: dict[str, Tensor]) -> None:
        self.engine, self.plan, self.sections = engine, plan, sections

    def run(self) -> Int32s:
        if not self.plan.rows:
            return self.plan.row_slots  # nothing to compute: slots were released
        return self.choose(*self.forward())

    def forward(self) -> tuple[Batch, Tensor]:
        """This iteration's batch and its logits float32, as the sampler wants them, before anything is forbidden or sampled."""
        batch = self._batch()
        return batch, self.engine.sampler.logits(self.engine.model(batch, self.engine.caches))

    def choose(self, batch: Batch, logits: Tensor) -> Int32s:
        """Samples from logits, which it may change, and advances the slots -> ids `[B]`."""
        state, sampler, slots = self.engine.slots, self.engine.sampler, batch.slots.long()
        flags = torch.cat((self.sections["decode_flags"], self.sections["prefill_flags"]))
        state.forbid_early_end(logits, slots, batch.lengths, sampler.first)
        tokens = sampler.choose(logits, state.sampling(slots, batch.lengths))
        ids: Int32s = state.advance(slots, batch.lengths, tokens, (flags & RowFlag.SAMPLE) != 0).numpy()
        return ids

    def _batch(self) -> Batch:
        sections, state = self.sections, self.engine.slots
        ids, positions, locations, lengths, query_starts = plan_unpack(
            state.page_table,
            state.length,
            state.last_token,
            state.done,
            sections["decode_slots"],
            sections["prefill_slots"],
            sections["prefill_starts"],
            sections["prefill_lengths"],
            sections["prefill_ids"],
            self.engine.page_size,
        )
        decode_rows = len(sections["decode_slots"])
        return Batch(
            ids=ids,
            positions=positions,
            locations=locations,
            last_tokens=torch.cat((torch.arange(decode_rows), decode_rows + query_starts[1:].long() - 1)),
            slots=torch.cat((sections["decode_slots"], sections["prefill_slots"])),
            lengths=lengths,
            query_starts=query_starts,
            page_table=state.page_table,
            decode_rows=decode_rows,
            max_query=int(self.plan.prefill_lengths.max(initial=0)),
        )


def _built(build: Callable[[], Decoder], dtype: torch.dtype) -> Decoder:
    """The model with parameters of `dtype`, not yet loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build().eval()
    finally:
        torch.set_default_dtype(before)
