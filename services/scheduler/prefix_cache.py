"""What requests of a group share: the pages of common prefixes, computed once. Two implementations, chosen by a setting.

A slot takes a prefix when it is admitted (`open`), offers what its plans write (`write`) and leaves with what is worth keeping
(`close`). Plans run in order, so pages may be read by later plans from the moment that their plan is sent; one that jumps reads
confirmed pages only.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.scheduler.pages import PagePool
from services.scheduler.radix import CONFIRMED, NO_PAGES, NOT_KNOWN, Node, Prefix, RadixTree
from shared.protocol.plan import Int32s


class PrefixCache(Protocol):
    """Over a pool. `ids` are always all tokens of a sequence, of which the last must be computed whatever is known."""

    @property
    def evictable_pages(self) -> int:
        """That `evict` would bring."""

    def lookup(self, namespace: str, ids: Int32s, confirmed_only: bool = False) -> Prefix:
        """What `open` would take."""

    def writer(self, prefix: Prefix, ids: Int32s) -> int | None:
        """The slot that was about to compute what follows this prefix of `ids`, if any was."""

    def open(self, slot: int, namespace: str, ids: Int32s, reuse: bool = True) -> Int32s:
        """The pages that the slot need not compute, which stay until `close`. Without `reuse` it computes all."""

    def write(self, slot: int, pages: Int32s, written: int, plan: int) -> None:
        """`plan` brings the slot to `written` tokens of `ids`; `pages` is its page table.

        Nothing is shared before `close` once another slot has computed the same: the slot would hold both copies.
        """

    def confirm(self, plan: int) -> None:
        """The result of `plan` is in; rows that failed have been given to `fail` before."""

    def fail(self, slot: int, last_plan: int) -> list[int]:
        """What the slot has computed is wrong. Returns all slots that use it, itself included; `last_plan` is the last one sent."""

    def close(self, slot: int, pages: Int32s, ids: Int32s, last_plan: int) -> None:
        """The slot's last plan has passed: its pages go back, but for those that hold `ids`, the tokens worth keeping."""

    def evict(self, count: int, last_plan: int) -> None:
        """Gives up to `count` pages without users back to the pool; no plan after `last_plan` touches them."""


class NoCache:
    """Every request computes everything."""

    evictable_pages = 0

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def lookup(self, namespace: str, ids: Int32s, confirmed_only: bool = False) -> Prefix:
        return NOT_KNOWN

    def writer(self, prefix: Prefix, ids: Int32s) -> int | None:
        return None

    def open(self, slot: int, namespace: str, ids: Int32s, reuse: bool = True) -> Int32s:
        return NO_PAGES

    def write(self, slot: int, pages: Int32s, written: int, plan: int) -> None:
        """Nothing is shared."""

    def confirm(self, plan: int) -> None:
        """Nothing is pending."""

    def fail(self, slot: int, last_plan: int) -> list[int]:
        return [slot]

    def close(self, slot: int, pages: Int32s, ids: Int32s, last_plan: int) -> None:
        self._pool.cool(slot, pages, last_plan)

    def evict(self, count: int, last_plan: int) -> None:
        """There is nothing to evict."""


@dataclass(slots=True)
class Lease:
    """What a slot uses of the tree."""

    number: int  # of this use of the tree; never used again
    ids: Int32s
    node: Node  # where its known prefix ends
    num_pages: int  # of that prefix
    claim: tuple[Node, bytes] | None = None  # the page that it computes next
    spoilt: bool = False  # by what was wrong: nothing of it is shared


class RadixCache:
    """Shares by a radix tree."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.tree = RadixTree(page_size)
        self._pool = pool
        self._page_size = page_size
        self._leases: dict[int, Lease] = {}  # by slot
        self._opened = 0
        self._pending: dict[int, list[Node]] = {}  # by the plan that writes them; the lower ends of edges that were split since
        self._claims: dict[tuple[Node, bytes], int] = {}  # (end of a known prefix, the tokens of its next page): who computes it

    @property
    def evictable_pages(self) -> int:
        return self.tree.evictable_pages

    def lookup(self, namespace: str, ids: Int32s, confirmed_only: bool = False) -> Prefix:
        return self.tree.lookup(namespace, ids[:-1], confirmed_only)

    def writer(self, prefix: Prefix, ids: Int32s) -> int | None:
        if prefix.end is None:
            return None
        return self._claims.get((prefix.end, self._page(ids[:-1], prefix.num_pages)))

    def open(self, slot: int, namespace: str, ids: Int32s, reuse: bool = True) -> Int32s:
        node, pages = self.tree.take(namespace, ids[:-1] if reuse else ids[:0])
        self._opened += 1
        lease = self._leases[slot] = Lease(self._opened, ids, node, len(pages))
        self._claim(slot, lease)
        return pages

    def write(self, slot: int, pages: Int32s, written: int, plan: int) -> None:
        lease = self._leases[slot]
        if not self.tree.goes_on(lease.node, self._page(lease.ids[:-1][:written], lease.num_pages)):
            self._insert(slot, lease, pages, lease.ids[:-1][:written], plan)
            self._claim(slot, lease)

    def confirm(self, plan: int) -> None:
        written = []
        for end in self._pending.pop(plan, ()):
            node: Node | None = end
            while node is not None and node.plan == plan:
                written.append(node.pages)
                node.plan = CONFIRMED
                node = node.parent
        if written:
            self._pool.confirm(np.concatenate(written))

    def fail(self, slot: int, last_plan: int) -> list[int]:
        lease = self._leases[slot]
        top, node = None, lease.node
        while node.parent is not None:
            if node.writer == lease.number:
                top = node
            node = node.parent
        users = [user for user, other in self._leases.items() if user == slot or (top is not None and _is_below(other.node, top))]
        for user in users:
            self._spoil(user, top)
        for gone in self.tree.detach(top) if top is not None else ():
            self._pool.evict(gone.pages, last_plan)
        return users

    def close(self, slot: int, pages: Int32s, ids: Int32s, last_plan: int) -> None:
        lease = self._leases[slot]
        if not lease.spoilt:
            self._insert(slot, lease, pages, ids, CONFIRMED)
        self._unclaim(slot, lease)
        del self._leases[slot]
        self.tree.unlock(lease.node)
        self._pool.cool(slot, pages[self._pool.owner[pages] == slot], last_plan)

    def evict(self, count: int, last_plan: int) -> None:
        if count > 0:
            self._pool.evict(self.tree.evict(count), last_plan)

    def _insert(self, slot: int, lease: Lease, pages: Int32s, tokens: Int32s, plan: int) -> None:
        """The whole pages of `tokens` that are not known yet; what another slot has computed too stays this slot's own."""
        first, end = lease.num_pages, len(tokens) // self._page_size
        if end <= first:
            return
        new = pages[first:end]
        node, known = self.tree.insert(lease.node, tokens[first * self._page_size : end * self._page_size], new, plan, lease.number)
        if known < len(new):
            self._pool.share(slot, new[known:], written=plan == CONFIRMED)
            if plan != CONFIRMED:
                self._pending.setdefault(plan, []).append(node)
        self.tree.lock(node, above=lease.node)
        lease.node, lease.num_pages = node, end

    def _spoil(self, slot: int, top: Node | None) -> None:
        """The slot uses `top`, which is wrong, and shares nothing any more. What is above, its plans on their way may still read."""
        lease = self._leases[slot]
        lease.spoilt = True
        self._unclaim(slot, lease)
        if top is not None and top.parent is not None and _is_below(lease.node, top):
            self.tree.unlock(lease.node, above=top.parent)
            lease.node = top.parent

    def _claim(self, slot: int, lease: Lease) -> None:
        self._unclaim(slot, lease)
        page = self._page(lease.ids[:-1], lease.num_pages)
        if page:
            lease.claim = lease.node, page
            self._claims[lease.claim] = slot

    def _unclaim(self, slot: int, lease: Lease) -> None:
        if lease.claim is not None and self._claims.get(lease.claim) == slot:
            del self._claims[lease.claim]
        lease.claim = None

    def _page(self, ids: Int32s, index: int) -> bytes:
        """The tokens of a page; none when it is not whole."""
        tokens = ids[index * self._page_size : (index + 1) * self._page_size]
        return tokens.tobytes() if len(tokens) == self._page_size else b""


def _is_below(node: Node, top: Node) -> bool:
    at: Node | None = node
    while at is not None and at is not top:
        at = at.parent
    return at is top
