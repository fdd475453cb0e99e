"""The prefix tree of one group: which sequences of tokens have their keys and values in which pages.

An edge holds whole pages: `page_size` tokens each, compared token by token. The tree of a namespace (a cache salt, an adapter) is its
own: what is under one is never found under another. The tree only names pages; their states are `PagePool`'s.

    root --[t0 t1 | t2 t3]-- node --[t4 t5]-- leaf        page_size 2, three pages
                              \\----[t6 t7]-- leaf         the first page of an edge tells siblings apart

Who uses a node, uses the path to it: `users` of a node counts all that use it or anything below. What has none can be evicted, from
its leaves upwards. Nothing here walks the whole tree.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shared.protocol.plan import Int32s

CONFIRMED = -1  # plan of a node whose pages have been written
SLACK = 64  # entries of the eviction heap that may be out of date, beside as many as there are nodes
NO_PAGES = np.empty(0, dtype=np.int32)


class Node:
    """The edge from its parent, and what follows it."""

    __slots__ = ("children", "last_used", "pages", "parent", "plan", "tokens", "users", "writer")

    def __init__(self, parent: "Node | None", tokens: Int32s, pages: Int32s, plan: int, writer: int) -> None:
        self.parent = parent  # None: a root, or a node that was taken out
        self.tokens = tokens  # [len(pages) * page_size]
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by their first page's tokens
        self.users = 0
        self.last_used = 0
        self.plan = plan  # that writes the pages, or CONFIRMED
        self.writer = writer  # the lease under which they are written


class _Root(Node):
    """Where the sequences of a namespace begin; there while it has children or users."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, NO_PAGES, NO_PAGES, CONFIRMED, 0)
        self.namespace = namespace


class Prefix(NamedTuple):
    """The longest known prefix of a sequence."""

    num_pages: int
    num_unused: int  # of these pages, that are without users now
    end: Node | None  # where it ends; None: at no node


NOT_KNOWN = Prefix(0, 0, None)


class RadixTree:
    """Time is counted in uses: the least recently used leaf goes first."""

    def __init__(self, page_size: int) -> None:
        self.evictable_pages = 0  # of nodes without users
        self.num_pages = 0
        self.num_nodes = 0
        self._page_size = page_size
        self._roots: dict[str, _Root] = {}
        self._uses = 0
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of (last used, tie-breaker, node); some are out of date
        self._pushed = 0

    def lookup(self, namespace: str, ids: Int32s, confirmed_only: bool = False) -> Prefix:
        """The longest known prefix of `ids`, in whole pages. Changes nothing.

        confirmed_only: without pages that a plan still has to write.
        """
        end: Node | None = self._roots.get(namespace)
        if end is None:
            return NOT_KNOWN
        num_pages = num_unused = 0
        for child, count in self._path(end, ids, confirmed_only):
            num_pages += count
            num_unused += 0 if child.users else count
            end = child if count == len(child.pages) else None
        return Prefix(num_pages, num_unused, end)

    def take(self, namespace: str, ids: Int32s) -> tuple[Node, Int32s]:
        """As `lookup`, for a new user: where the prefix ends and its pages. An edge within which it ends is split there."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
        node: Node = root
        pages = [NO_PAGES]
        for child, count in self._path(node, ids):
            node = self._split(child, count) if count < len(child.pages) else child
            pages.append(node.pages)
        self.lock(node)
        return node, np.concatenate(pages)

    def goes_on(self, node: Node, page: bytes) -> bool:
        """Whether `page`, the bytes of its tokens, is known to follow."""
        return page in node.children

    def insert(self, node: Node, tokens: Int32s, pages: Int32s, plan: int, writer: int) -> tuple[Node, int]:
        """Makes `pages` follow `node`, which has users, for `tokens`, `[len(pages) * page_size]`.

        Returns where they end, and how many of them were known already, which the tree does not take.
        """
        known = 0
        for child, count in self._path(node, tokens):
            node = self._split(child, count) if count < len(child.pages) else child
            known += count
        if known == len(pages):
            return node, known
        leaf = Node(node, tokens[known * self._page_size :].copy(), pages[known:].copy(), plan, writer)
        node.children[self._key(leaf.tokens)] = leaf
        self.num_nodes += 1
        self.num_pages += len(leaf.pages)
        self.evictable_pages += len(leaf.pages)
        self._touch(leaf)
        self._offer(leaf)
        return leaf, known

    def lock(self, node: Node, above: Node | None = None) -> None:
        """One more user of `node` and of the path to it; of a user of `above`, a node of that path, only of what is below that."""
        self._uses += 1
        at: Node | None = node
        while at is not None and at is not above:
            if not at.users:
                self.evictable_pages -= len(at.pages)
            at.users += 1
            at.last_used = self._uses
            at = at.parent

    def unlock(self, node: Node, above: Node | None = None) -> None:
        """The reverse of `lock`."""
        self._uses += 1
        at: Node | None = node
        while at is not None and at is not above:
            at.users -= 1
            at.last_used = self._uses
            if not at.users:
                self.evictable_pages += len(at.pages)
                self._offer(at)
            at = at.parent

    def evict(self, count: int) -> Int32s:
        """Takes out up to `count` pages that have no users, of the least recently used leaves, from the ends of their edges."""
        taken = [NO_PAGES]
        while count > 0 and self._leaves:
            last_used, _, leaf = self._leaves[0]
            if leaf.last_used != last_used or not _is_free_leaf(leaf):
                heapq.heappop(self._leaves)
                continue
            keep = max(len(leaf.pages) - count, 0)
            gone = leaf.pages[keep:]
            taken.append(gone)
            count -= len(gone)
            self.num_pages -= len(gone)
            self.evictable_pages -= len(gone)
            if keep:
                leaf.pages, leaf.tokens = leaf.pages[:keep], leaf.tokens[: keep * self._page_size]
                break
            heapq.heappop(self._leaves)
            self._unlink(leaf)
            self.num_nodes -= 1
        return np.concatenate(taken)

    def detach(self, top: Node) -> list[Node]:
        """Takes out `top`, which has no users, and all below it; for what turned out to be wrong. Returns these nodes."""
        gone, left = [], [top]
        while left:
            node = left.pop()
            gone.append(node)
            left.extend(node.children.values())
            node.children = {}
            self.num_pages -= len(node.pages)
            self.evictable_pages -= len(node.pages)
        self.num_nodes -= len(gone)
        self._unlink(top)
        for node in gone:
            node.parent, node.plan = None, CONFIRMED
        return gone

    def nodes(self) -> Iterator[Node]:
        """All but the roots. For tests."""
        left: list[Node] = list(self._roots.values())
        while left:
            node = left.pop()
            left.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _path(self, node: Node, ids: Int32s, confirmed_only: bool = False) -> Iterator[tuple[Node, int]]:
        """The nodes below `node` that match `ids`, each with how many of its pages do: all but for the last."""
        size, at = self._page_size, 0
        while at + size <= len(ids):
            child = node.children.get(self._key(ids[at:]))
            if child is None or (confirmed_only and child.plan != CONFIRMED):
                return
            length = min(len(child.tokens), len(ids) - at)
            differs = child.tokens[:length] != ids[at : at + length]
            first = int(differs.argmax())
            count = (first if differs[first] else length) // size
            ends = count < len(child.pages)
            yield child, count  # which may be split there
            if ends:
                return
            at += count * size
            node = child

    def _split(self, node: Node, count: int) -> Node:
        """Cuts an edge after `count` pages. The lower half stays the node that it was, for those that use it; returns the upper."""
        parent, cut = node.parent, count * self._page_size
        assert parent is not None  # a root has no edge
        upper = Node(parent, node.tokens[:cut], node.pages[:count], node.plan, node.writer)
        upper.users, upper.last_used = node.users, node.last_used
        parent.children[self._key(node.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[count:], upper
        upper.children[self._key(node.tokens)] = node
        self.num_nodes += 1
        return upper

    def _key(self, tokens: Int32s) -> bytes:
        return tokens[: self._page_size].tobytes()

    def _touch(self, node: Node) -> None:
        self._uses += 1
        node.last_used = self._uses

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None  # a root is not taken out so
        del parent.children[self._key(node.tokens)]
        node.parent = None
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """The node may be free to be evicted now; a root without children and users is dropped."""
        if node.users or node.children:
            return
        if isinstance(node, _Root):
            del self._roots[node.namespace]
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushed, node))
        if len(self._leaves) > 2 * self.num_nodes + SLACK:
            self._leaves = [entry for entry in self._leaves if entry[0] == entry[-1].last_used and _is_free_leaf(entry[-1])]
            heapq.heapify(self._leaves)


def _is_free_leaf(node: Node) -> bool:
    return node.parent is not None and not node.children and not node.users
