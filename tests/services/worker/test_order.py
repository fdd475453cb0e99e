"""Which iteration comes next."""

from services.worker.order import LaunchOrder


def launch(order: LaunchOrder[str], count: int = 100) -> str:
    launched = ""
    while count and (head := order.head()) is not None:
        order.advance()
        launched += head
        count -= 1
    return launched


def test_plans_run_as_they_came_with_all_their_iterations() -> None:
    order: LaunchOrder[str] = LaunchOrder()
    for plan, iterations in (("a", 2), ("b", 1), ("c", 3)):
        order.add(plan, iterations, jump=False)
    assert launch(order) == "aabccc"
    assert order.head() is None


def test_a_jump_goes_before_the_next_iteration_even_of_a_burst() -> None:
    order: LaunchOrder[str] = LaunchOrder()
    order.add("a", 3, jump=False)
    order.add("b", 1, jump=False)
    assert launch(order, 1) == "a"
    order.add("J", 1, jump=True)
    assert len(order) == 3
    assert launch(order) == "Jaab"


def test_at_most_one_jump_between_two_iterations_and_jumps_in_their_own_order() -> None:
    order: LaunchOrder[str] = LaunchOrder()
    order.add("a", 2, jump=False)
    for jump in "JKLM":
        order.add(jump, 1, jump=True)
    assert launch(order) == "JaKaLM"  # nothing is left that L and M could hold up


def test_what_came_after_a_jump_waits_for_it() -> None:
    order: LaunchOrder[str] = LaunchOrder()
    order.add("a", 1, jump=False)
    order.add("J", 1, jump=True)
    order.add("K", 1, jump=True)
    order.add("b", 1, jump=False)
    order.add("L", 1, jump=True)
    assert launch(order) == "JaKbL"


def test_nothing_is_left_after_clear() -> None:
    order: LaunchOrder[str] = LaunchOrder()
    order.add("a", 2, jump=False)
    order.add("J", 1, jump=True)
    launch(order, 1)
    order.clear()
    assert len(order) == 0
    order.add("K", 1, jump=True)
    order.add("b", 1, jump=False)
    assert launch(order) == "Kb"
