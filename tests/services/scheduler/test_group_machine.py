"""A group against a device of plain Python that executes its plans late: no token lost, no page in two hands, whatever comes between.

`mutants.py` has a patch for each invariant that is checked here; `test_mutants.py` requires that each makes this machine fail.
"""

from collections import Counter, deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.ends import FAILED, Finished
from services.scheduler.group import Group
from services.scheduler.pages import PageState
from services.scheduler.prefix_cache import RadixCache
from services.scheduler.radix import CONFIRMED, Node
from services.scheduler.requests import Request
from services.scheduler.slots import SlotState
from services.scheduler.steps import StepResult
from shared.protocol.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from shared.protocol.plan import Limits, Plan, PlanFlag
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.device import FAIL, Device, next_token

VOCAB_SIZE = 9
SHAPES = {  # by page size: none has pages for all of its slots
    1: Limits(slots=4, pages=25, page_size=1, max_length=14, max_step_tokens=6, vocab_size=VOCAB_SIZE),
    4: Limits(slots=4, pages=12, page_size=4, max_length=30, max_step_tokens=9, vocab_size=VOCAB_SIZE),
    16: Limits(slots=3, pages=7, page_size=16, max_length=70, max_step_tokens=40, vocab_size=VOCAB_SIZE),
}
ENGINE = METRICS.engine("group")
CANCELLED = Finished(FINISH_REASON_CANCELLED)
picks = st.integers(0, 11)  # one of those that are there


def model(ids: list[int], vocab_size: int) -> int:
    """As `next_token`, but some sequences have logits that are not finite."""
    token = next_token(ids, 10 * vocab_size)
    return FAIL if token == 1 else token % vocab_size


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.submitted = 0
        self.delivered: dict[int, list[int]] = {}  # what a gateway has, by request
        self.live: dict[int, Request] = {}
        self.away: list[Request] = []  # that have left the group
        self.requests: dict[int, Request] = {}  # all of them
        self.slot_epoch = 3
        self.broken: set[Request] = set()  # had a row that was made to fail
        self.preempted: dict[Request, tuple[int, int, int]] = {}  # (slot, epoch, the last plan that names it)

    @initialize(
        page_size=st.sampled_from(sorted(SHAPES)),
        share=st.sampled_from([1, 0.5, 0.3]),
        overlap=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["mixed", "mixed", "prefill-first", "decode-first"]),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def choose(self, page_size: int, share: float, overlap: bool, policy: str, prefix_cache: bool) -> None:
        self.limits = SHAPES[page_size]
        self.options = {"policy": policy, "prefix_cache": prefix_cache}
        self.max_step_tokens, self.overlap = max(int(share * self.limits.max_step_tokens), 1), overlap
        self.start()

    def start(self) -> None:
        self.plans: deque[Plan] = deque()
        self.results: deque[StepResult] = deque()
        self.wakes: deque[float] = deque()  # seconds after which the group wants to be called
        self.preempted.clear()
        self.wrong: set[int] = set()  # leases under which something was computed that is not finite
        self.group = Group(
            "group",
            self.limits,
            self.slot_epoch,
            self.max_step_tokens,
            self.overlap,
            self.plans.append,
            self.deliver,
            ENGINE,
            wake=self.wakes.append,
            **self.options,  # type: ignore[arg-type]
        )
        self.device = Device(self.limits, self.group.memory.pool, model)
        for slot in self.device.slots:
            slot.epoch = self.slot_epoch
        cache = self.group.memory.cache
        if isinstance(cache, RadixCache):
            fail, leases = cache.fail, cache._leases

            def remember(slot: int, last_plan: int) -> list[int]:
                self.wrong.add(leases[slot].number)
                return fail(slot, last_plan)

            cache.fail = remember  # type: ignore[method-assign]

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            got = self.delivered[request.key.request]
            got.extend(request.output[len(got) :])
            if request.end is not None:
                del self.live[request.key.request]
                self.check_end(request)
            elif request.leaving and request.slot is None:
                self.away.append(self.live.pop(request.key.request))

    def check_end(self, request: Request) -> None:
        prompt, output = request.prompt_ids.tolist(), list(request.output)
        assert output == self.delivered[request.key.request]
        for index, token in enumerate(output):
            assert token == model(prompt + output[:index], VOCAB_SIZE)
        for index, token in enumerate(output[:-1]):  # it should have ended here
            assert index + 1 <= request.min_tokens or token not in request.ending_ids
        assert len(output) <= request.max_tokens
        match request.end:
            case Finished(reason) if reason == FINISH_REASON_STOP:
                assert output[-1] in request.ending_ids
                assert len(output) > request.min_tokens
            case Finished(reason) if reason == FINISH_REASON_LENGTH:
                assert len(output) == request.max_tokens
            case end if end == FAILED:
                assert model(prompt + output, VOCAB_SIZE) == FAIL or request in self.broken
            case end:
                assert end == CANCELLED

    @rule(
        pages=st.lists(st.sampled_from([2, 2, 2, 3]), max_size=5),  # whole pages that other prompts have too
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=5),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_ids=st.sampled_from([(), (), (4,), (4, 5)]),
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from(["", "b"]),
        cache_salt=st.sampled_from(["", "", "", "salt"]),
        copies=st.sampled_from([1, 1, 3]),
    )
    def submit(
        self, pages: list[int], tail: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool, stop_ids: tuple[int, ...],
        priority: int, tenant: str, cache_salt: str, copies: int,
    ) -> None:  # fmt: skip
        prompt = [token for page in pages for token in [page] * self.limits.page_size] + tail
        prompt = prompt[: self.limits.max_length - 1]
        for _ in range(copies):
            request = make_request(
                self.submitted,
                prompt,
                min(max_tokens, self.limits.max_length - len(prompt)),
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                stop_ids=stop_ids,
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                arrived_at=self.now,
            )
            self.delivered[self.submitted] = []
            self.live[self.submitted] = self.requests[self.submitted] = request
            self.submitted += 1
            self.group.submit(request, self.now)

    @precondition(lambda self: self.plans)
    @rule(count=st.integers(1, 3), jumps=st.booleans())
    def compute(self, count: int, jumps: bool) -> None:
        """A plan that may jump is run at the front of the queue, or in its turn: later plans wait for it in any case."""
        for _ in range(min(count, len(self.plans))):
            jump = next((plan for plan in self.plans if plan.flags & PlanFlag.JUMP), None) if jumps else None
            plan = self.plans[0] if jump is None else jump
            del self.plans[self.plans.index(plan)]
            self.check_admissions(plan)
            self.results.append(self.device.run(plan))

    def check_admissions(self, plan: Plan) -> None:
        """Whoever starts does so with the request's own seed, whatever slot it gets, and is told apart by it here."""
        for record in plan.admissions:
            request = self.requests[int(record["seed_low"]) | int(record["seed_high"]) << 32]
            assert record["max_length"] == request.max_length
            (row,) = np.flatnonzero(plan.prefill_slots == record["slot"])
            end = int(plan.prefill_lengths[: row + 1].sum())
            ids = plan.prefill_ids[end - plan.prefill_lengths[row] : end]
            start = int(plan.prefill_starts[row])
            assert ids.tolist() == request.prefill_ids[start : start + len(ids)].tolist()

    @precondition(lambda self: self.results)
    @rule(count=st.integers(1, 3), delay_us=st.sampled_from([0, 300, 2_000]))
    def return_results(self, count: int, delay_us: int) -> None:
        self.now += delay_us / 1e6
        for _ in range(min(count, len(self.results))):
            self.group.on_result(self.results.popleft(), self.now)

    @precondition(lambda self: self.wakes)
    @rule(late_us=st.sampled_from([0, 100, 1_000]))
    def wake(self, late_us: int) -> None:
        """Newcomers that wait for others have waited long enough."""
        self.now += self.wakes.popleft() + late_us / 1e6
        self.group.on_time(self.now)

    @precondition(lambda self: self.live)
    @rule(pick=picks, accepted=st.one_of(st.none(), st.integers(0, 5)))
    def cancel(self, pick: int, accepted: int | None) -> None:
        request = self.live[sorted(self.live)[pick % len(self.live)]]
        request.accepted_tokens = accepted
        self.group.end(request, CANCELLED, self.now)
        assert request.key.request not in self.live

    @precondition(lambda self: self.group.num_running)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        slots = self.group.slots
        running = [slot for slot in range(self.limits.slots) if slots.state[slot] in (SlotState.PREFILL, SlotState.DECODE)]
        if running:
            slot = running[pick % len(running)]
            request = slots.requests[slot]
            assert request is not None
            self.preempted[request] = (slot, int(slots.epoch[slot]), int(slots.last_plan[slot]))
            self.group.occupancy.preempt(slot)
            self.group._advance(self.now)

    @precondition(lambda self: self.group.num_running)
    @rule(pick=picks)
    def move(self, pick: int) -> None:
        """Somewhere else, once what is on its way has come."""
        running = self.group.running()
        self.group.move(running[pick % len(running)], self.now)

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self) -> None:
        """As from another group, with the tokens that it has."""
        request = self.away.pop()
        request.leaving = False
        request.moves += 1
        self.live[request.key.request] = request
        self.group.submit(request, self.now)

    @precondition(lambda self: self.group.num_running)
    @rule(pick=picks)
    def break_a_row(self, pick: int) -> None:
        """The next one of a slot, perhaps in the middle of its prefill."""
        running = [(slot, request) for slot, request in enumerate(self.group.slots.requests) if request is not None]
        slot, request = running[pick % len(running)]
        self.device.slots[slot].fails = True
        self.broken.add(request)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        self.group.memory.cache.evict(count, self.group.passed)
        self.group._advance(self.now)

    @rule()
    def lose_the_group(self) -> None:
        """Its requests go on in another, with the tokens they have."""
        self.slot_epoch = max(slot.epoch for slot in self.device.slots)
        requests = self.group.evacuate()
        assert {request.key.request for request in requests} == set(self.live)
        assert len(requests) == len(self.live)
        self.start()
        for request in requests:
            request.leaving = False
            self.group.submit(request, self.now)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        pool, slots = self.group.memory.pool, self.group.slots
        pool.check()
        assert sum(pool.count(state) for state in PageState) == self.limits.pages
        for slot in range(self.limits.slots):
            table = slots.pages(slot).tolist()
            assert set(np.flatnonzero(pool.owner == slot).tolist()) <= set(table)
            assert len(set(table)) == len(table)
            if any(slot in plan.slots for plan in self.group._outstanding.values()):  # which may still touch them
                assert not set(table) & set(np.flatnonzero(pool.state == PageState.READY).tolist())

    @invariant()
    def slots_and_requests_agree(self) -> None:
        group, slots = self.group, self.group.slots
        for slot in range(self.limits.slots):
            is_running = slots.state[slot] not in (SlotState.FREE, SlotState.RETIRED)
            assert (slots.requests[slot] is not None) == is_running
            if is_running:
                assert slots.planned[slot] <= slots.max_length[slot]
        running = [request for request in slots.requests if request is not None]
        assert group.num_running == len(running)
        assert len(running) + len(group.waiting) == len(self.live)
        requests = Counter(request.tenant for request in self.live.values())
        for tenant in ("", "b"):
            index = group.tenants._index.get(tenant)
            assert requests[tenant] == (group.tenants._requests[index] if index is not None else 0)

    @invariant()
    def preemption_waits_for_results(self) -> None:
        """But for requests that used what a failed row had computed: those begin again at once."""
        spoilt = self.group.memory.cache._leases if isinstance(self.group.memory.cache, RadixCache) else {}
        for request, (slot, epoch, plan) in list(self.preempted.items()):
            is_spoilt = slot in spoilt and spoilt[slot].spoilt
            if request.end is not None or is_spoilt or self.group.slots.epoch[slot] != epoch:
                del self.preempted[request]
            elif request.slot is None:
                del self.preempted[request]
                assert self.group.passed >= plan

    @invariant()
    def promises_can_be_kept(self) -> None:
        memory, slots = self.group.memory, self.group.slots
        assert memory.promised == np.maximum(slots.promised - slots.num_pages, 0).sum()
        assert memory.promised <= memory.pool.num_ready + memory.cache.evictable_pages

    @invariant()
    def the_tree_holds_what_it_says(self) -> None:
        cache, pool = self.group.memory.cache, self.group.memory.pool
        if not isinstance(cache, RadixCache):
            assert not pool.count(PageState.PENDING)
            assert not pool.count(PageState.CACHED)
            return
        nodes = list(cache.tree.nodes())
        users: Counter[Node] = Counter()
        for slot, lease in cache._leases.items():
            assert self.group.slots.state[slot] != SlotState.FREE
            node: Node | None = lease.node
            while node is not None:
                users[node] += 1
                node = node.parent
        pages = Counter(page for node in nodes for page in node.pages.tolist())
        assert set(pages.values()) <= {1}
        assert set(pages) == set(np.flatnonzero((pool.state == PageState.PENDING) | (pool.state == PageState.CACHED)).tolist())
        for node in nodes:
            assert node.users == users[node]
            assert len(node.tokens) == len(node.pages) * self.limits.page_size > 0
            if node.plan == CONFIRMED:
                assert (pool.state[node.pages] == PageState.CACHED).all()
                assert (self.device.cache[node.pages].ravel() == node.tokens).all(), "the keys and values of other tokens"
            else:
                assert (pool.state[node.pages] == PageState.PENDING).all()
                assert node.plan in self.group._outstanding
        assert not any(node.writer in self.wrong for node in nodes)
        unused = {page for node in nodes if not node.users for page in node.pages.tolist()}
        for slot in range(self.limits.slots):  # nobody reads what may be evicted
            assert not unused & set(self.group.slots.pages(slot).tolist())
        assert cache.tree.num_nodes == len(nodes)
        assert cache.tree.num_pages == len(pages)
        assert cache.tree.evictable_pages == sum(len(node.pages) for node in nodes if not node.users)

    @invariant()
    def the_device_is_kept_busy(self) -> None:
        if self.live:
            assert self.plans or self.results, "requests are left and nothing is on its way"

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        while self.away:
            self.come_back()
        for _ in range(10_000):
            if not self.plans and not self.results:
                break
            if self.plans:
                self.compute(3, jumps=True)
            if self.results:
                self.return_results(3, 100)
        while self.wakes:
            self.wake(0)
        group = self.group
        assert not self.live
        assert not group.waiting.tokens
        assert group.memory.free == self.limits.pages - 1
        assert not group.num_outstanding
        assert group.slots.num_free == self.limits.slots
        assert (group.slots.state == SlotState.FREE).all()
        group.memory.cache.evict(self.limits.pages, group.passed)
        assert group.memory.pool.num_ready == self.limits.pages - 1


GroupMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestGroup = GroupMachine.TestCase
