"""Who has which slot of a group, and its pages: one way in, one way out, and all is given back once the last plan has passed.

docs/scheduling.md draws the life of a slot.
"""

from services.scheduler.admission import Admissions
from services.scheduler.ends import End
from services.scheduler.memory import Memory
from services.scheduler.meter import Mean
from services.scheduler.metrics import EngineMetrics
from services.scheduler.pages import InvariantError
from services.scheduler.requests import Request
from services.scheduler.slots import Slots
from services.scheduler.tenants import Tenants
from services.scheduler.waiting import WaitingQueue
from shared.protocol.plan import Int32s, Limits


class Occupancy:
    """The requests of a group, those that wait for a slot included."""

    def __init__(self, group: str, limits: Limits, highest_slot_epoch: int, prefix_cache: bool, metrics: EngineMetrics) -> None:
        self.slots = Slots(limits, highest_slot_epoch)
        self.memory = Memory(limits, self.slots, prefix_cache)
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        self.admissions = Admissions(self.waiting, self.slots, self.memory, limits.page_size)
        self.num_running = 0
        self.prefilling: dict[int, None] = {}  # slots in state PREFILL, in order of admission
        self.leaving: list[int] = []  # slots that are being preempted
        self.retired: list[int] = []
        self.releases: list[int] = []  # retired slots whose done flag the device does not know to set
        self.grown: list[Request] = []  # to be delivered: have tokens, and nothing else has happened to them
        self.updated: dict[Request, None] = {}  # to be delivered: all others of which there is something to tell
        self.stay_s = Mean()  # for so long a request has a slot, until it ends
        self.passed = -1  # the id up to which every plan has passed
        self.now = 0.0  # the time of what is handled
        self._group, self._metrics = group, metrics
        self._page_size = limits.page_size

    def admit(self, request: Request, ids: Int32s) -> Int32s:
        """Gives a free slot to a request that waits and has to prefill `ids`. Returns the pages that it need not compute."""
        slots = self.slots
        request.slot = slot = slots.admit(request, ids)
        slots.tenant[slot], slots.taken_at[slot] = self.tenants.join(request.tenant), self.now
        self.waiting.remove(request)
        slots.secure_until[slot] = len(ids) + self._page_size if request.preemptions else 0
        pages = self.memory.admit(slot, request.cache_salt, ids, reuse=not request.needs_scores)
        known = len(pages) * self._page_size
        self._metrics.admitted(known, len(request.prompt_ids) if request.admitted_at is None else None)
        request.timeline.add(self.now, "admitted", self._group, len(ids), known)
        if request.admitted_at is None:
            request.admitted_at = self.now
            request.cached_tokens = min(known, len(request.prompt_ids))
        self.num_running += 1
        self.prefilling[slot] = None
        return pages

    def retire(self, slot: int, end: End | None, *, release: bool) -> None:
        """The one way out of a slot: no further rows or grants; finalised once its last plan has passed.

        end: of the request; None when it waits for another slot, elsewhere if it is leaving. release: the device must be told that the
        row is done.
        """
        slots = self.slots
        request: Request | None = slots.requests[slot]
        if request is None:
            raise InvariantError(f"slot {slot} is retired and has no running request")
        self._stop_rows(slot)
        if slot in self.leaving:
            self.leaving.remove(slot)
        slots.retire(slot, request.prefill_ids[: min(request.reusable, int(slots.planned[slot]))])
        self.tenants.leave(request.tenant)
        self.retired.append(slot)
        self.num_running -= 1
        request.slot = None
        if end is None and request.leaving:
            self.updated[request] = None
        elif end is None:
            self._metrics.preempted()
            request.preemptions += 1
            request.timeline.add(self.now, "preempted", self._group, len(request.output))
            self.waiting.push(request)
        else:
            self.stay_s.count(self.now - float(slots.taken_at[slot]))
            self.conclude(request, end)
        if slots.last_plan[slot] <= self.passed:
            self.finalise_passed()
        elif release:
            self.releases.append(slot)

    def preempt(self, slot: int) -> None:
        """Takes the slot from its request, once what is on its way for it has come."""
        self._stop_rows(slot)
        self.slots.leave(slot)
        self.leaving.append(slot)
        if self.slots.last_plan[slot] <= self.passed:
            self.retire(slot, None, release=False)

    def finalise_passed(self) -> None:
        """Frees the slots whose last plan has passed, and their pages."""
        passed, slots = self.passed, self.slots
        for slot in self.leaving.copy():
            if slots.last_plan[slot] <= passed and slot in self.leaving:  # retiring another one comes here, too
                self.retire(slot, None, release=False)
        for slot in [slot for slot in self.retired if slots.last_plan[slot] <= passed]:
            self.retired.remove(slot)
            ids = slots.ids[slot]
            assert ids is not None  # it is retired
            self.memory.cache.close(slot, slots.pages(slot), ids, int(slots.last_plan[slot]))
            slots.free(slot)
            if slot in self.releases:
                self.releases.remove(slot)
        self.memory.pool.pass_to(passed)

    def conclude(self, request: Request, end: End) -> None:
        """The request has ended, wherever it was."""
        request.end = end
        self.updated[request] = None

    def take_updated(self) -> list[Request]:
        """What is to be delivered."""
        updated = [*self.grown, *self.updated]
        self.grown.clear()
        self.updated.clear()
        return updated

    def evacuate(self, *, planned: bool) -> list[Request]:
        """Takes all requests: running ones and those that have left without being told first, then those that wait."""
        left = [request for request in self.updated if request.leaving and request.slot is None and request.end is None]
        begun = self.running() + left
        for request in begun:
            request.slot = None
            request.moves += 1
            request.unplanned_moves += not planned
        self.take_updated()  # all have been told, or are returned; a timer may still call
        return begun + self.waiting.drain()

    def ended(self) -> list[Request]:
        """Those that are still to be delivered."""
        return [request for request in self.updated if request.end is not None]

    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return [request for request in self.slots.requests.tolist() if request is not None]

    def _stop_rows(self, slot: int) -> None:
        self.memory.end_promise(slot)
        self.prefilling.pop(slot, None)
        self.admissions.on_left(slot)
