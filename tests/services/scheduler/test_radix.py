"""The tree against a dictionary from prefixes to pages; what matching and eviction cost in a large one."""

import time
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.scheduler.radix import CONFIRMED, Node, RadixTree
from shared.protocol.plan import Int32s

Prefix = tuple[str, tuple[int, ...]]

namespaces = st.sampled_from(["", "salt"])
tokens = st.lists(st.integers(1, 2), max_size=12)


def ids_of(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


class RadixTreeMachine(RuleBasedStateMachine):
    """Two token ids, so that prefixes often meet. A use is what the tree gave for it; the dictionary says what it must give."""

    uses = Bundle("uses")

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def choose(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.cached: dict[Prefix, int] = {}
        self.pages = count(1)
        self.locked: list[Prefix] = []

    def prefixes(self, namespace: str, ids: list[int]) -> list[Prefix]:
        return [(namespace, tuple(ids[:end])) for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def known(self, namespace: str, ids: list[int]) -> list[int]:
        pages = []
        for prefix in self.prefixes(namespace, ids):
            if prefix not in self.cached:
                break
            pages.append(self.cached[prefix])
        return pages

    @rule(namespace=namespaces, ids=tokens)
    def lookup(self, namespace: str, ids: list[int]) -> None:
        found = self.tree.lookup(namespace, ids_of(*ids))
        pages = self.known(namespace, ids)
        used = {prefix for space, path in self.locked for prefix in self.prefixes(space, list(path))}
        assert found.num_pages == len(pages)
        assert found.num_unused == sum(prefix not in used for prefix in self.prefixes(namespace, ids)[: len(pages)])
        if found.end is not None:
            assert self.depth(found.end) == len(pages)

    @rule(target=uses, namespace=namespaces, ids=tokens)
    def use(self, namespace: str, ids: list[int]) -> object:
        """Takes what is known, and adds the rest."""
        pages = self.known(namespace, ids)
        node, taken = self.tree.take(namespace, ids_of(*ids))
        assert taken.tolist() == pages
        whole = ids[: len(ids) // self.page_size * self.page_size]
        rest = whole[len(pages) * self.page_size :]
        new = [next(self.pages) for _ in self.prefixes(namespace, rest)]
        if new:
            end, duplicates = self.tree.insert(node, ids_of(*rest), ids_of(*new), CONFIRMED, 1)
            assert not duplicates
            self.cached.update(zip(self.prefixes(namespace, whole)[len(pages) :], new, strict=True))
            self.tree.lock(end, above=node)
            node = end
        self.locked.append((namespace, tuple(whole)))
        return node, (namespace, tuple(whole))

    @rule(use=consumes(uses))
    def leave(self, use: tuple[Node, Prefix]) -> None:
        node, path = use
        self.tree.unlock(node)
        self.locked.remove(path)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        before = self.tree.evictable_pages
        gone = set(self.tree.evict(count).tolist())
        assert len(gone) == min(count, before)
        used = {prefix for namespace, ids in self.locked for prefix in self.prefixes(namespace, list(ids))}
        for prefix in [prefix for prefix, page in self.cached.items() if page in gone]:
            assert prefix not in used
            del self.cached[prefix]
        for namespace, ids in self.cached:  # only ends were taken
            assert len(ids) == self.page_size or (namespace, ids[: -self.page_size]) in self.cached

    @rule(target=uses)
    def nothing(self) -> object:
        return multiple()

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        nodes = list(self.tree.nodes())
        assert sorted(page for node in nodes for page in node.pages.tolist()) == sorted(self.cached.values())
        assert self.tree.num_pages == len(self.cached)
        assert self.tree.num_nodes == len(nodes)
        used = {prefix for namespace, ids in self.locked for prefix in self.prefixes(namespace, list(ids))}
        assert self.tree.evictable_pages == len(self.cached) - len(used)

    def depth(self, node: Node) -> int:
        return len(node.pages) + (self.depth(node.parent) if node.parent is not None else 0)


RadixTreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRadixTree = RadixTreeMachine.TestCase


def tree_of(page_size: int, *sequences: tuple[str, Int32s]) -> RadixTree:
    tree, pages = RadixTree(page_size), count(1)
    for namespace, ids in sequences:
        node, known = tree.take(namespace, ids)
        rest = ids[len(known) * page_size : len(ids) // page_size * page_size]
        tree.insert(node, rest, ids_of(*(next(pages) for _ in range(len(rest) // page_size))), CONFIRMED, 1)
        tree.unlock(node)
    return tree


def test_the_least_recently_used_end_goes_first() -> None:
    tree = tree_of(1, ("", ids_of(1, 2, 3)), ("", ids_of(1, 2, 4)))  # pages 1 2 3, then 4
    tree.unlock(tree.take("", ids_of(1, 2, 3))[0])
    assert tree.evict(1).tolist() == [4]
    assert tree.evict(1).tolist() == [3]
    assert tree.evict(9).tolist() == [1, 2]
    assert not tree._roots


def test_splitting_an_edge_in_use_keeps_both_halves() -> None:
    tree = tree_of(1, ("", ids_of(1, 2, 3, 4)))
    user, pages = tree.take("", ids_of(1, 2, 3, 4))
    other, shared = tree.take("", ids_of(1, 2, 5))
    assert (pages.tolist(), shared.tolist()) == ([1, 2, 3, 4], [1, 2])
    tree.unlock(other)
    assert not len(tree.evict(4))
    tree.unlock(user)
    assert sorted(tree.evict(4).tolist()) == [1, 2, 3, 4]


def test_pfx_07_a_prefix_is_found_under_its_own_salt_only() -> None:
    tree = tree_of(2, ("a", ids_of(1, 2, 3, 4)))
    assert tree.lookup("a", ids_of(1, 2, 3, 4)).num_pages == 2
    assert tree.lookup("b", ids_of(1, 2, 3, 4)).num_pages == 0
    assert tree.lookup("", ids_of(1, 2, 3, 4)).num_pages == 0


def test_pfx_08_lookup_compares_tokens_and_no_hash_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even siblings whose keys collide are taken for each other: here all do."""

    class Colliding(bytes):
        __hash__ = lambda self: 0  # noqa: E731

    key = RadixTree._key
    monkeypatch.setattr(RadixTree, "_key", lambda self, ids: Colliding(key(self, ids)))
    sequences = [ids_of(first, second, 1, third) for first in (-1, -2, 3) for second in (1, 2) for third in (1, 2)]
    tree = tree_of(2, *(("", ids) for ids in sequences[:-1]))
    assert [tree.lookup("", ids).num_pages for ids in sequences] == [2] * (len(sequences) - 1) + [1]


def large(num_pages: int) -> RadixTree:
    """Conversations of 50 pages of one token, in pairs that share the first half."""
    tree = RadixTree(1)
    for pair in range(num_pages // 75):
        root, _ = tree.take("", ids_of())
        half, _ = tree.insert(root, np.full(25, pair, dtype=np.int32), np.zeros(25, dtype=np.int32), CONFIRMED, 1)
        for end in (1, 2):
            tree.insert(half, np.full(25, -end, dtype=np.int32), np.zeros(25, dtype=np.int32), CONFIRMED, 1)
        tree.unlock(root)
    return tree


def test_a_large_tree_costs_no_more_than_a_small_one() -> None:
    """At 10^6 pages at most twice the time of 10^4, for what a request does: match, lock, unlock, and evict as many pages."""
    trees = {size: large(size) for size in (10_000, 1_000_000)}
    best_us: dict[tuple[int, str], float] = {}

    def measure(size: int, name: str, operation: Callable[[int], object]) -> None:
        for _ in range(5):
            began = time.thread_time_ns()
            for number in range(40):
                operation(number)
            spent_us = (time.thread_time_ns() - began) / 40e3
            best_us[size, name] = min(spent_us, best_us.get((size, name), spent_us))

    for size, tree in trees.items():
        spread = tree.num_pages // 75 // 40
        queries = [np.concatenate((np.full(25, pair * spread), np.full(25, -1))).astype(np.int32) for pair in range(40)]
        measure(size, "match", lambda number, tree=tree, queries=queries: tree.unlock(tree.take("", queries[number])[0]))  # type: ignore[misc]
        measure(size, "evict", lambda number, tree=tree: tree.evict(10))  # type: ignore[misc]
    print({f"{name} at {size}": round(us, 1) for (size, name), us in best_us.items()})
    for name in ("match", "evict"):
        assert best_us[1_000_000, name] <= 2 * best_us[10_000, name] + 2
