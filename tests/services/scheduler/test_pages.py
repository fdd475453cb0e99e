import numpy as np
import pytest

from services.scheduler.pages import InvariantError, OutOfPages, PagePool, PageState
from shared.protocol.plan import SCRATCH_PAGE, Int32s


def owners(*slots: int) -> Int32s:
    return np.array(slots, dtype=np.int32)


def test_pages_go_round() -> None:
    pool = PagePool(6)
    pages = pool.grant(owners(3, 3, 4))
    assert SCRATCH_PAGE not in pages
    assert len(set(pages.tolist())) == 3
    assert pool.owner[pages].tolist() == [3, 3, 4]
    assert pool.num_ready == 2
    pool.cool(3, pages[:2], last_plan=7)
    pool.check()
    pool.pass_to(6)
    assert pool.count(PageState.COOLING) == 2  # plan 7 may still write them
    assert pool.num_ready == 2
    pool.pass_to(7)
    assert pool.num_ready == 4
    pool.check()


def test_cooling_ends_plan_by_plan_whatever_the_order_it_began_in() -> None:
    pool = PagePool(4)
    early, late = pool.grant(owners(1)), pool.grant(owners(2))
    pool.cool(2, late, last_plan=9)
    pool.cool(1, early, last_plan=5)
    pool.pass_to(5)
    assert pool.state[early].tolist() == [PageState.READY]
    assert pool.state[late].tolist() == [PageState.COOLING]


def test_too_few_pages_take_none() -> None:
    pool = PagePool(3)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 ready"):
        pool.grant(owners(1, 1, 1))
    assert pool.num_ready == 2
    pool.check()


def test_a_page_is_taken_back_once_and_from_its_owner() -> None:
    pool = PagePool(4)
    pages = pool.grant(owners(1, 1))
    with pytest.raises(InvariantError):
        pool.cool(2, pages, last_plan=0)
    pool.cool(1, pages, last_plan=0)
    with pytest.raises(InvariantError):
        pool.cool(1, pages, last_plan=0)
    pool.check()


def test_check_sees_a_page_in_two_states() -> None:
    pool = PagePool(4)
    page = pool.grant(owners(1))
    pool.state[page] = PageState.READY
    with pytest.raises(InvariantError):
        pool.check()
