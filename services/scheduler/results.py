"""What results bring: tokens to the requests of their rows, failures to all who use what has failed.

Nearly every token is one of many alike: it neither begins nor ends a completion. Those are entered together, by a few operations on
whole arrays; only the requests of the others are looked at one by one.
"""

import numpy as np
from numpy.typing import NDArray

from services.scheduler.ends import FAILED, STOPPED_EARLY, Finished
from services.scheduler.metrics import EngineMetrics
from services.scheduler.occupancy import Occupancy
from services.scheduler.requests import Request
from services.scheduler.scores import Records, by_row, by_token
from services.scheduler.slots import Rows
from services.scheduler.steps import Outstanding, StepResult
from shared.protocol.plan import FAILED_ROW, Int32s

_NONE_FAILED = np.empty((0, 0), dtype=np.bool_)


class Results:
    """Of one group, for the requests of `occupancy`."""

    def __init__(self, group: str, occupancy: Occupancy, metrics: EngineMetrics) -> None:
        self.all_failed = 0  # in a row: rows failed, and none brought a token
        self._group, self._occupancy, self._metrics = group, occupancy, metrics
        self._slots, self._memory = occupancy.slots, occupancy.memory

    def take(self, result: StepResult, plan: Outstanding, extremes: tuple[int, int], last_plan: int) -> None:
        """extremes: the least and the greatest id. last_plan: that was sent.

        What a plan sent ahead brought for a slot that has been retired or used anew since is dropped.
        """
        slots, (least, greatest) = self._slots, extremes
        records = self._take_prompt_scores(result, plan, last_plan) if len(result.logprobs) else {}
        live = slots.running_epoch[plan.slots] == result.slot_epochs
        if plan.prefill_tokens:
            live &= plan.samples
        rows, tokens, at = plan.slots, result.ids, live.nonzero()[0]
        if len(at) < len(live):
            rows, tokens = rows[at], tokens.take(at, axis=1)
        self._time(rows, tokens, result.step_us / 1e6, begin=plan.prefill_tokens > 0, lack=least < 0)
        lengths = slots.confirmed[rows] + len(tokens)
        alone = self._alone(rows, tokens, lengths, lack=least < 0)
        if least != FAILED_ROW:
            self._memory.cache.confirm(result.plan_id)
            if np.count_nonzero(alone):
                self._take_alone(at[alone], result, plan, records)
                alike = (~alone).nonzero()[0]
                rows, tokens, lengths = rows[alike], tokens.take(alike, axis=1), lengths[alike]
            self._take_alike(rows, tokens, lengths)
        else:  # a failed row may concern any other
            failed = (result.ids == FAILED_ROW) & (slots.epoch[plan.slots] == result.slot_epochs)
            self._take_alone(at, result, plan, records, failed, last_plan)
        if greatest >= 0:
            self.all_failed = 0
        elif least == FAILED_ROW:  # rows that have no token for another reason tell nothing
            self.all_failed += 1

    def _alone(self, rows: Rows, tokens: Int32s, lengths: Int32s, *, lack: bool) -> NDArray[np.bool_]:
        """Which rows bring more than another token to a completion that goes on: the first, perhaps the last, or none."""
        alone: NDArray[np.bool_] = lengths >= self._slots.plain_below[rows]
        endings = self._slots.endings[tokens.astype(np.intp)]
        if np.count_nonzero(endings):
            alone |= endings.any(axis=0)
        if lack:
            alone |= (tokens < 0).any(axis=0)
        return alone

    def _take_alike(self, rows: Rows, tokens: Int32s, lengths: Int32s) -> None:
        """tokens `[iterations, rows]` that neither begin nor end the completions of these slots, which have `lengths` tokens then."""
        slots = self._slots
        slots.confirmed[rows] = lengths
        requests: list[Request] = slots.requests[rows].tolist()
        for ids in tokens.tolist():
            for request, token in zip(requests, ids, strict=True):
                request.output.append(token)
        self._occupancy.grown += requests

    def _take_alone(
        self,
        rows: Rows,
        result: StepResult,
        plan: Outstanding,
        records: Records,
        failed: NDArray[np.bool_] = _NONE_FAILED,
        last_plan: int = -1,
    ) -> None:
        """rows: those of the plan, by index, whose tokens are taken one by one, iteration after iteration. failed: `[iterations, rows]`."""
        slots = plan.slots[rows].tolist()
        requests = [self._slots.request(slot) for slot in slots]
        for iteration, ids in enumerate(result.ids):
            if len(failed):
                self._confirm(result.plan_id, plan.slots[failed[iteration]].tolist(), last_plan)
            for row, slot, request, token in zip(rows.tolist(), slots, requests, ids[rows].tolist(), strict=True):
                if request.slot is not None:  # else it was retired just now
                    self._take_token(slot, request, token, records.get((row, request.length)))

    def _take_token(self, slot: int, request: Request, token: int, record: bytes | None) -> None:
        slots, retire = self._slots, self._occupancy.retire
        if token < 0:
            retire(slot, STOPPED_EARLY, release=False)
            return
        if slots.confirmed[slot] == slots.target[slot]:
            self._note_first_token(request, self._occupancy.now)
            slots.first_token(slot)
        slots.confirmed[slot] += 1
        self._occupancy.updated[request] = None
        if request.scores is not None:
            request.scores.take_token(record)
        reason = request.append(token)
        if reason is not None:
            retire(slot, Finished(reason), release=False)

    def _confirm(self, plan_id: int, failed: list[int], last_plan: int) -> None:
        """A plan has written what it should, but for the slots whose rows were not finite: nobody uses what those have computed.

        Who did so, begins again with the tokens that came before.
        """
        users = [user for slot in failed for user in self._memory.cache.fail(slot, last_plan)]
        self._memory.cache.confirm(plan_id)
        for user in users:
            if self._slots.requests[user] is not None:
                self._occupancy.retire(user, FAILED if user in failed else None, release=user not in failed)

    def _take_prompt_scores(self, result: StepResult, plan: Outstanding, last_plan: int) -> Records:
        """Keeps what a result tells of prompts; returns all that it tells."""
        failed = []
        for row, run in by_row(result.logprobs[result.logprobs["row"] >= plan.decode_rows]):
            slot = int(plan.slots[row])
            request: Request | None = self._slots.requests[slot]
            if request is None or request.scores is None or self._slots.epoch[slot] != result.slot_epochs[row]:
                continue
            of_prompt = run[run["position"] < len(request.prompt_ids)]
            if len(of_prompt):
                if not request.scores.take_prompt(of_prompt):
                    failed.append(slot)
                self._occupancy.updated[request] = None
        if failed:
            self._confirm(result.plan_id, failed, last_plan)
        return by_token(result.logprobs)

    # For the metrics

    def _time(self, rows: Rows, tokens: Int32s, step_s: float, *, begin: bool, lack: bool) -> None:
        """tokens `[iterations, rows]` of these slots, of which the last came now, and a burst's one after the other.

        begin: they may be first tokens. lack: there may be ids that are none.
        """
        later = len(tokens) - 1
        gaps_s = self._occupancy.now - later * step_s - self._slots.last_token_at[rows]
        self._slots.last_token_at[rows] = self._occupancy.now
        number = tokens.size
        if lack:
            gaps_s, number = gaps_s[tokens[0] >= 0], int(np.count_nonzero(tokens >= 0))
        if later:  # dated back by the worker's time, perhaps to before the last one that was seen
            gaps_s = np.concatenate((np.maximum(gaps_s, 0.0), np.full(number - len(gaps_s), step_s)))
        self._metrics.tokens(number, gaps_s[~np.isnan(gaps_s)] if begin else gaps_s)

    def _note_first_token(self, request: Request, now: float) -> None:
        assert request.admitted_at is not None  # it has a slot
        request.timeline.add(now, "first_token", self._group, len(request.output) + 1)
        if not request.output:  # it was not resumed
            self._metrics.first_token(len(request.prompt_ids), request.admitted_at - request.arrived_at, now - request.admitted_at)
        if request.first_token_at is None:
            request.first_token_at = now
