"""The engine that computes: a model, its KV cache and its slots on one rank's device.

B rows, T tokens.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.compilation import hash_sources, receipt
from kernels.plan_unpack import plan_unpack
from kernels.tuning import borrowed
from services.worker.distributed.board import Mark
from services.worker.distributed.communicator import Communicator, communicator
from services.worker.engine.batch import Batch
from services.worker.engine.devices import HOST_KV_CACHE_BYTES, check_gpu, communicator_of, device_of, dtype_of, tell_borrowed
from services.worker.engine.features import Feature, SlotFeatures, variants
from services.worker.engine.graphs import Graphs
from services.worker.engine.interface import Facts, Memory, Progress, RankSpec
from services.worker.engine.logprobs import PromptScores, table
from services.worker.engine.penalties import Penalties
from services.worker.engine.rehearsal import Rehearsal
from services.worker.engine.sampling import Sampler, sampler_of
from services.worker.engine.sections import Sections, samples
from services.worker.engine.sizes import PrefillSizes
from services.worker.engine.slots import Slots
from services.worker.engine.staging import PlanStaging, ResultRing
from services.worker.engine.step import TorchStep
from services.worker.kvcache import CacheShape, LayerCache, allocate
from services.worker.layers.backends import backends
from services.worker.layers.linear import head_share
from services.worker.models.decoder import Decoder
from services.worker.models.registry import describe
from services.worker.weights.folder import ModelFolder
from services.worker.weights.loader import load
from services.worker.weights.random_weights import randomise
from shared.errors import ConfigError
from shared.protocol.plan import Int32s, Plan

logger = logging.getLogger(__name__)

GRAPH_MEMORY_BYTES = 1 << 30  # kept free of the KV cache: captured graphs, and what libraries allocate when first used


class TorchEngine:
    """Executes plans in the order in which it is given them; every rank of a group does the same."""

    def __init__(self, spec: RankSpec, progress: Progress, group: Communicator | None = None) -> None:
        """group: the ranks that have met already; None: they meet at the spec's rendezvous."""
        # More threads would cut elementwise operations at places that depend on the batch, and the ends of a cut are rounded otherwise.
        torch.set_num_threads(1 if spec.deterministic else spec.threads)
        torch.set_grad_enabled(False)
        self.device = device = device_of(spec)
        if device.type == "cuda":
            hash_sources()
        self.mark = mark = Mark(spec.board_fd, spec.rank)
        kind = communicator_of(spec, device)
        if group is None:
            timeouts = spec.start_timeout_s, spec.step_timeout_s
            group = communicator(spec.rank, spec.ranks, spec.rendezvous, device, kind, *timeouts, mark, progress, spec.peer_memory)
        self.sums = group.sums

        progress("loading weights", 0.0)
        folder = ModelFolder(spec.model, spec.load_format)
        cls, config, remarks = describe(folder.config, folder.tensors.keys())
        if group.rank == 0:
            for remark in remarks:
                logger.warning("%s", remark)
        max_length = spec.max_model_len or config.max_length
        if max_length > config.max_length:
            raise ConfigError(f"max_model_len: {max_length} is more than the model's {config.max_length} positions")
        if device.type == "cuda":
            check_gpu(spec, max_length)
        dtype = dtype_of(spec, device)
        self.model = _built(lambda: cls(config, backends(group, device, spec.deterministic), max_length), dtype, device)
        shards = self.model.shards(folder.tensors.keys())
        if spec.load_format == "random":
            randomise(folder.config, shards, progress)
        else:
            load(folder, shards, progress, self.model.ignores)

        head = self.model.head
        self.sampler: Sampler = sampler_of(spec.sampling_gather, head, mark)
        self.page_size = spec.page_size
        pages_per_slot = -(-max_length // spec.page_size)
        self.slots = Slots(spec.slots, pages_per_slot, torch.tensor(folder.eos_ids, dtype=torch.int32, device=device))
        self.features = SlotFeatures(spec.slots)
        self.penalties = Penalties(spec.slots + 1, self.sampler.columns, self.sampler.first, max_length, device)
        self.prompt_scores = PromptScores(spec.slots, self.sampler)
        self.max_length = max_length
        kinds = variants(self.sampler.apart)
        self._rehearsal = Rehearsal(self.step, kinds, self.slots.padding, spec.slots, spec.max_step_tokens, device)
        self.caches: list[LayerCache] = []
        self.token_ids = torch.empty(0)  # [pages * page_size] int32: whose keys and values the cache holds at each place
        shape = CacheShape(config.layers, spec.page_size, len(head_share(config.kv_heads, group)), config.head_dim, dtype)
        budget = spec.kv_cache_memory_bytes or HOST_KV_CACHE_BYTES
        if device.type == "cuda":
            self._allocate(shape, 1)
            limits = max_length, spec.slots, spec.page_size, spec.max_step_tokens, spec.cuda_graphs
            ways = dtype, kind, group.size, spec.peer_memory, spec.sampling_gather, spec.deterministic
            self._compile(receipt(torch.cuda.get_device_name(device), config, limits, ways), spec.threads, progress)
            fixed = spec.num_pages is not None or spec.kv_cache_memory_bytes is not None
            if not group.minimum(int(fixed)):  # of all ranks, for what is tried adds up over all: a node may have a setting of its own
                left = self._memory_left(spec, progress)
                budget = budget if fixed else left
        pages = group.minimum(spec.num_pages or min(budget // shape.page_bytes, spec.slots * pages_per_slot + 1))
        if pages < 2:
            raise ConfigError(f"kv_cache_memory_bytes: {budget} hold no two pages of {shape.page_bytes} bytes")
        progress("allocating the KV cache", 0.0)
        self._allocate(shape, pages)

        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        self.memory = Memory(weights, kv_cache=pages * shape.page_bytes)
        self.staging: PlanStaging | None = None
        self.graphs: Graphs | None = None
        if device.type == "cuda":
            self._rehearsal.compile(progress)
            progress("trying what graphs are worth", 0.0)
            # The same on every rank: what they add up must have one size.
            most = group.minimum(self._rehearsal.tokens_worth_capturing()) if spec.cuda_graphs else 0
            sizes = PrefillSizes(spec.slots, most)
            self.staging = PlanStaging(spec.slots, spec.max_step_tokens, sizes, self.slots.padding, device)
            self.results = ResultRing(spec.slots)
            if spec.cuda_graphs:
                self.graphs = Graphs(spec.slots, sizes, self.step, kinds, self.staging, progress)
            torch.cuda.synchronize()
        if group.rank == 0:
            tell_borrowed(device)
        self.facts = Facts(pages, max_length, config.vocab_size, folder.eos_ids, len(borrowed(device)))

    def reset(self) -> None:
        self.slots.reset()

    def begin(self, plan: Plan, words: Int32s) -> TorchStep:
        step = TorchStep(self, plan, words)
        step.load()
        sections = step.sections
        if len(plan.release_slots):
            self.slots.release(sections["release_slots"])
        if len(plan.admissions):
            before = self.features.of(plan.admissions["slot"])
            self.features.admit(plan.admissions)
            self.slots.admit(sections["admissions"])
            if Feature.PENALTIES in before | self.features.of(plan.admissions["slot"]):
                self.penalties.admit(sections["admissions"])
        if len(plan.bias_slots):
            self.penalties.bias(*(sections[f"bias_{name}"] for name in ("slots", "indexes", "ids", "values")))
        if len(plan.grant_slots):
            self.slots.grant(sections["grant_slots"], sections["grant_indexes"], sections["grant_pages"])
        return step

    def batch(self, sections: Sections, max_query: int) -> Batch:
        """What a step computes, from the rows of its plan and the slots' state."""
        state = self.slots
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
            self.page_size,
        )
        self.token_ids[locations] = ids
        decode_slots, prefill_slots = sections["decode_slots"], sections["prefill_slots"]
        decode_rows, last_tokens, slots = len(decode_slots), None, decode_slots
        if len(prefill_slots):
            last_of_chunks = decode_rows + query_starts[1:].long() - 1
            last_tokens = torch.cat((torch.arange(decode_rows, device=self.device), last_of_chunks))
            slots = torch.cat((decode_slots, prefill_slots))
        return Batch(
            ids=ids,
            positions=positions,
            locations=locations,
            last_tokens=last_tokens,
            slots=slots,
            lengths=lengths,
            query_starts=query_starts,
            page_table=state.page_table,
            decode_rows=decode_rows,
            max_query=max_query,
        )

    def choose(self, batch: Batch, hidden: Tensor, sampled: Tensor, features: Feature) -> Tensor:
        """Samples what follows from hidden states `[B, D]`, and advances the slots -> ids `[B]` int32, or with LOGPROBS a table of them.

        sampled `[B]` bool: the rows that yield a token.
        """
        state, sampler, slots, decodes = self.slots, self.sampler, batch.slots, batch.decode_rows
        sampling = state.sampling(slots, batch.lengths) if features else None
        scores = sampler.score(hidden, sampling, features)
        raw = scores.wanted_logits.clone() if Feature.LOGPROBS in features else None
        if Feature.PENALTIES in features:
            if batch.rows > decodes:
                prefills = slots[decodes:], batch.lengths[decodes:], sampled[decodes:]
                self.penalties.recount(*prefills, self.token_ids, state.page_table, self.page_size)
            self.penalties.apply(scores.wanted_logits, slots)
        if Feature.LEAST_LENGTH in features:
            state.forbid_early_end(scores.wanted_logits, slots, batch.lengths, sampler.first)
        ids = state.advance(slots, batch.lengths, sampler.choose(scores, sampling), sampled)
        if Feature.PENALTIES in features:
            self.penalties.count(slots, ids)
        return ids if raw is None else table(ids, batch.lengths, sampler.logprobs(raw, ids))

    def step(self, sections: Sections, max_query: int, features: Feature) -> Tensor:
        """A whole step -> what `choose` gives; from what the device holds alone, so that it can be captured.

        max_query: of the longest prefill chunk, or more.
        """
        batch = self.batch(sections, max_query)
        return self.choose(batch, self.model(batch, self.caches), samples(sections), features)

    def _allocate(self, shape: CacheShape, pages: int) -> None:
        self.caches = allocate(shape, pages, self.device)
        self.token_ids = torch.zeros(pages * self.page_size, dtype=torch.int32, device=self.device)

    def _compile(self, known: Path, threads: int, progress: Progress) -> None:
        """All kernels of steps, found in a run of each kind of layer instead of all layers; unless they are known to be in the cache."""
        if self.model.group.minimum(int(known.exists())):  # of all ranks: they run, and add up, together
            return
        layers, caches = self.model.layers, self.caches
        self.model.layers = self.model.layer_of_each_kind()
        self.caches = caches[:1] * len(self.model.layers)
        try:
            self._rehearsal.prepare(threads, progress)
        finally:
            self.model.layers, self.caches = layers, caches
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()

    def _memory_left(self, spec: RankSpec, progress: Progress) -> int:
        """Bytes for the KV cache: the rank's part of the GPU less what is in use and what the largest step needs, which is tried."""
        progress("measuring memory", 0.0)
        step_bytes = self._rehearsal.step_bytes()
        self.caches.clear()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        # Twice the step: once for steps that are launched, once for those that are captured, whose memory is their own.
        budget = int(total * spec.memory_fraction) - (total - free) - 2 * step_bytes - GRAPH_MEMORY_BYTES
        return max(budget, 0) // min(spec.local_ranks, spec.ranks_per_gpu)


def _built(build: Callable[[], Decoder], dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model with parameters of `dtype` on `device`, not yet loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return build().eval()
    finally:
        torch.set_default_dtype(before)
