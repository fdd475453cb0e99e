"""One plan, as the engine executes it: brought to the device once, then launched once for each of its iterations.

B rows.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.engine.batch import Batch
from services.worker.engine.features import Feature
from services.worker.engine.interface import Flight, Landed
from services.worker.engine.logprobs import ids_of, records_of, scored_tokens
from services.worker.engine.sections import decode_sections, samples, sections_of
from services.worker.engine.sizes import aligned
from services.worker.engine.staging import PlanStaging
from shared.protocol.plan import Int32s, Plan, RowFlag

if TYPE_CHECKING:
    from services.worker.engine.engine import TorchEngine


class TorchStep:
    def __init__(self, engine: "TorchEngine", plan: Plan, words: Int32s) -> None:
        self.engine, self.plan, self.words = engine, plan, words
        self.scores: Tensor | None = None  # of prompts, once it has run: a table
        staging = engine.staging
        self.sections = sections_of(plan, torch.from_numpy(words) if staging is None else staging.words)

    def load(self) -> None:
        """Brings the plan to the device, where another may have taken its place since."""
        staging = self.engine.staging
        if staging is not None and staging.loaded is not self.words:
            staging.load(self.plan, self.words)

    def launch(self) -> Flight:
        engine, plan = self.engine, self.plan
        if not plan.rows:
            return Landed(plan.row_slots)  # nothing to compute: slots were released
        self.load()
        features = engine.features.of(plan.row_slots)
        wanted = engine.features.asking(plan.row_slots, Feature.LOGPROBS)
        replayed = None if engine.graphs is None or (plan.prefill_flags & RowFlag.SCORE).any() else engine.graphs.replay(plan, features)
        if replayed is not None:
            engine.mark.count_replayed()
            return engine.results.send(replayed, wanted)
        if engine.staging is not None:
            return engine.results.send(self._launched(engine.staging, features), wanted, self.scores)
        result = self.choose(*self.forward())
        host = result.numpy()
        return Landed(ids_of(host), records_of(host, wanted, None if self.scores is None else self.scores.numpy()))

    def _launched(self, staging: PlanStaging, features: Feature) -> Tensor:
        """The step kernel by kernel, on a GPU; with prefill filled up, so that few shapes of it have to be compiled."""
        plan = self.plan
        decodes, prefills = len(plan.decode_slots), len(plan.prefill_slots)
        if (plan.prefill_flags & RowFlag.SCORE).any():
            return self.choose(*self.forward())
        if not prefills:
            return self.engine.step(decode_sections(staging.decode_slots[:decodes]), 0, features)
        missing = staging.filled.tokens - len(plan.prefill_ids)  # are one row's, too
        filled = staging.sections(aligned(decodes), staging.filled)
        result = self.engine.step(filled, max(int(plan.prefill_lengths.max()), missing), features)
        begin = aligned(decodes)
        return torch.cat((result[:decodes], result[begin : begin + prefills])) if decodes else result[:prefills]

    def forward(self) -> tuple[Batch, Tensor]:
        """This iteration's batch and its last hidden states `[B, D]`."""
        engine = self.engine
        batch = engine.batch(self.sections, int(self.plan.prefill_lengths.max(initial=0)))
        scored = scored_tokens(self.plan, engine.device)
        if scored is None:
            return batch, engine.model(batch, engine.caches)
        assert batch.last_tokens is not None, "prompts are scored in prefill"
        hidden = engine.model(replace(batch, last_tokens=torch.cat((batch.last_tokens, scored))), engine.caches)
        self.scores = engine.prompt_scores.score(self.plan, self.sections["prefill_ids"], hidden[batch.rows :])
        return batch, hidden[: batch.rows]

    def choose(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The engine's, with the plan's flags and what its rows ask for."""
        return self.engine.choose(batch, hidden, samples(self.sections), self.engine.features.of(self.plan.row_slots))
