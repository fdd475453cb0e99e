"""For each invariant of the scheduler's books, patches that break it. `test_mutants.py` requires that a state machine notices each.

A patch replaces text within one function; the text must be there once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    breaks: str  # what is no longer true
    module: str  # of services.scheduler
    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.breaks.replace(" ", "-")


MUTANTS = (
    # A page is in one state, and every way to READY goes through cooling.
    Mutant("pages cool", "pages", "PagePool.pass_to", "self._cooling[0][0] <= plan", "True"),
    Mutant(
        "pages of a failed row cool",
        "prefix_cache",
        "RadixCache.fail",
        "self._pool.evict(gone.pages, last_plan)",
        "self._pool.evict(gone.pages, -1)",
    ),
    Mutant(
        "a slot is used anew after its last plan",
        "occupancy",
        "Occupancy.finalise_passed",
        "for slot in self.retired if slots.last_plan[slot] <= passed]",
        "for slot in self.retired]",
    ),
    Mutant("a slot has a new epoch for each use", "slots", "Slots.admit", "self.epoch[slot] += 1", "self.epoch[slot] += 0"),
    Mutant(
        "a split edge keeps its users",
        "radix",
        "RadixTree._split",
        "upper.users, upper.last_used = node.users, node.last_used",
        "upper.users, upper.last_used = 0, node.last_used",
    ),
    Mutant(
        "pages in use are not evicted",
        "radix",
        "RadixTree.evict",
        "leaf.last_used != last_used or not _is_free_leaf(leaf)",
        "leaf.parent is None",
    ),
    Mutant("a user uses the whole path", "radix", "RadixTree.lock", "at = at.parent", "at = None"),
    Mutant(
        "a failed row's users keep what is above",
        "prefix_cache",
        "RadixCache._spoil",
        "self.tree.unlock(lease.node, above=top.parent)\n            lease.node = top.parent",
        "self.tree.unlock(lease.node)\n            lease.node = self.tree.take('', lease.ids[:0])[0]",
    ),
    Mutant("admission counts pages that become used", "memory", "Memory.cost", " + prefix.num_unused", ""),
    # A running slot's pages stay its own.
    Mutant("the tree takes no duplicates", "radix", "RadixTree.insert", "pages[known:].copy()", "pages[: len(pages) - known].copy()"),
    Mutant(
        "duplicates stay owned",
        "prefix_cache",
        "RadixCache._insert",
        "self._pool.share(slot, new[known:], ",
        "self._pool.share(slot, new, ",
    ),
    # Only what is written and accepted is shared.
    Mutant("the last accepted token has no keys yet", "requests", "Request.reusable", "+ accepted - 1", "+ accepted + 3"),
    Mutant(
        "only what was computed is shared",
        "occupancy",
        "Occupancy.retire",
        "[: min(request.reusable, int(slots.planned[slot]))]",
        "[: request.reusable]",
    ),
    Mutant(
        "a full hit computes a token",
        "prefix_cache",
        "RadixCache.open",
        "ids[:-1] if reuse",
        "ids if reuse",
    ),
    # Pending pages are read by later plans in order only; a failed row takes its pages along.
    Mutant("a jump reads confirmed pages", "admission", "Admissions.next", "cannot = self._jump and", "cannot = False and"),
    Mutant("a failed row leaves nothing", "prefix_cache", "RadixCache.fail", "if node.writer == lease.number:", "if False:"),
    Mutant(
        "users of failed pages begin again",
        "results",
        "Results._confirm",
        "if self._slots.requests[user] is not None:",
        "if user in failed and self._slots.requests[user] is not None:",
    ),
    Mutant(
        "pages are pending until their plan is in",
        "prefix_cache",
        "RadixCache.confirm",
        "self._pool.confirm(np.concatenate(written))",
        "pass",
    ),
    # One way out of a slot.
    Mutant("a retired slot gets no chunks", "occupancy", "Occupancy._stop_rows", "self.prefilling.pop(slot, None)", "pass"),
    Mutant("a slot is finalised once", "occupancy", "Occupancy.finalise_passed", "self.retired.remove(slot)", "pass"),
    Mutant(
        "results for a slot that is given up are taken first",
        "occupancy",
        "Occupancy.finalise_passed",
        "if slots.last_plan[slot] <= passed and slot in self.leaving",
        "if slot in self.leaving",
    ),
    Mutant("promises end with their slot", "occupancy", "Occupancy._stop_rows", "self.memory.end_promise(slot)", "pass"),
    # What is sampled depends on the request only, wherever it is computed.
    Mutant("the seed is the request's", "steps", "_admission", "sampling.seed & 0xFFFFFFFF", "slot & 0xFFFFFFFF"),
    # Everybody comes to an end.
    Mutant("somebody gives way when pages run out", "planner", "Planner._make_room", "if victim is None:", "if True:"),
    Mutant(
        "who waits for a prefix is told when its slot leaves",
        "occupancy",
        "Occupancy._stop_rows",
        "self.admissions.on_left(slot)",
        "pass",
    ),
    # Every stream ends, and once, whatever is sent and lost.
    Mutant(
        "requests of a lost group go on",
        "scheduler",
        "Scheduler.remove_group",
        "self._place_anew(going_on, now, hold=True)",
        "pass",
    ),
    Mutant(
        "requests whose row has failed go on",
        "scheduler",
        "Scheduler.deliver",
        "self._place_anew(left + failed, now, hold=True)",
        "self._place_anew(left, now, hold=True)",
    ),
    Mutant(
        "a Cancel may come before its Submit",
        "early_cancels",
        "EarlyCancels.take",
        "self._attempts.pop(key, 0) >= attempt",
        "self._attempts.pop(key, 0) < 0",
    ),
    Mutant("nobody is held for ever", "scheduler", "Scheduler.tick", "request.held_until <= now", "request.held_until < 0"),
    Mutant("a newer attempt retires the older", "scheduler", "Scheduler._submit", "self._end(older, SUPERSEDED, now)", "pass"),
)
