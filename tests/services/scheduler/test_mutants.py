"""The state machines are worth their time: they fail for every patch of `mutants.py`; those of OF_ALL_GROUPS break the machine of
`test_scheduler_machine.py`, all others that of `test_group_machine.py`.

They are driven by plain chance here: Hypothesis spends its first examples on small ones, which break nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from random import Random
from types import CodeType
from typing import Any

import pytest

from tests.services.scheduler.mutants import MUTANTS, Mutant
from tests.services.scheduler.test_group_machine import GroupMachine
from tests.services.scheduler.test_scheduler_machine import PROMPT, SESSIONS, WANTED, SchedulerMachine

MOST_LIVES = 400  # until a patch shows
STEPS = 50
OF_ALL_GROUPS = ("early_cancels", "scheduler")  # modules


def functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from functions(constant)


def apply(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"services.scheduler.{mutant.module}")
    target = attrgetter(mutant.function)(module)
    function: Any = target.fget if isinstance(target, property) else target
    text, whole = inspect.getsource(function), inspect.getsource(module)
    assert text.count(mutant.old) == 1, f"{mutant.function} has {mutant.old!r} {text.count(mutant.old)} times"
    source = whole.replace(text, text.replace(mutant.old, mutant.new))
    (code,) = (code for code in functions(compile(source, "mutant", "exec")) if code.co_qualname == mutant.function)
    monkeypatch.setattr(function, "__code__", code)


def submit(machine: GroupMachine, chance: Random) -> None:
    machine.submit(
        pages=chance.choices([2, 3], [3, 1], k=chance.randint(0, 5)),
        tail=chance.choices([1, 2], k=chance.randint(1, 5)),
        max_tokens=chance.randint(1, 30),
        min_tokens=chance.randint(0, 3),
        ignore_eos=chance.random() < 0.5,
        stop_ids=chance.choice([(), (4,)]),
        priority=chance.choice([0, 0, 1]),
        tenant=chance.choice(["", "b"]),
        cache_salt=chance.choice(["", "", "", "salt"]),
        copies=chance.choice([1, 1, 3]),
    )


def compute(machine: GroupMachine, chance: Random) -> None:
    if machine.plans:
        machine.compute(count=chance.randint(1, 3), jumps=chance.random() < 0.5)


def return_results(machine: GroupMachine, chance: Random) -> None:
    if machine.results:
        machine.return_results(count=chance.randint(1, 3), delay_us=chance.choice([0, 300, 2_000]))


def disturb(machine: GroupMachine, chance: Random) -> None:
    if machine.live:
        pick = chance.randrange(12)
        if machine.group.num_running:
            chance.choice([machine.preempt, machine.break_a_row])(pick=pick)
        machine.evict(count=chance.randint(1, 5))
        if machine.live and chance.random() < 0.3:
            machine.cancel(pick=pick, accepted=chance.choice([None, 0, 2]))


def wake(machine: GroupMachine, chance: Random) -> None:
    if machine.wakes:
        machine.wake(late_us=chance.choice([0, 100, 1_000]))


ACTIONS: tuple[Callable[[GroupMachine, Random], None], ...] = (submit, wake, compute, compute, return_results, return_results, disturb)


def live(chance: Random) -> None:
    machine = GroupMachine()
    machine.choose(
        page_size=chance.choice([1, 4, 16]),
        share=chance.choice([1, 0.5, 0.3]),
        overlap=True,
        policy=chance.choice(["mixed", "prefill-first", "decode-first"]),
        prefix_cache=True,
    )
    for _ in range(STEPS):
        chance.choice(ACTIONS)(machine, chance)
        machine.every_page_is_in_one_state()
        machine.slots_and_requests_agree()
        machine.preemption_waits_for_results()
        machine.promises_can_be_kept()
        machine.the_tree_holds_what_it_says()
        machine.the_device_is_kept_busy()
    machine.teardown()


def live_with_gateways(chance: Random) -> None:
    machine = SchedulerMachine()
    for _ in range(STEPS):
        session, number, which = chance.choice(SESSIONS), chance.randint(0, 5), chance.randint(0, 1)
        match chance.randrange(10):
            case 0 | 1 | 2:
                prompt = chance.choice([(1,), PROMPT, (1, 2, 3, 4)])
                resume, deadline, wanted = chance.choice([0, 0, 2]), chance.random() < 0.2, chance.choice(WANTED)
                machine.submit(session, number, prompt, resume, deadline, wanted)
            case 3:
                machine.cancel(session, number, ahead=chance.randint(0, 1))
            case 4 if len(machine.running) < 2:
                machine.add_a_group()
            case 5 if machine.running and chance.random() < 0.5:
                machine.lose_a_group(which)
            case 6:
                machine.let_time_pass(chance.choice([0.1, 2.0]))
            case 7 if machine.running and chance.random() < 0.3:
                machine.break_rows(which, whole_group=chance.random() < 0.5)
            case _:
                machine.compute(which, count=chance.randint(1, 4))
        machine.nobody_is_forgotten()
    machine.teardown()


def live_often(lives: int, machine: Callable[[Random], None]) -> None:
    for seed in range(lives):
        machine(Random(seed))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_machine_notices_when_it_is_no_longer_true_that(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(mutant, monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  # a contradiction that shows anywhere
        live_often(MOST_LIVES, live_with_gateways if mutant.module in OF_ALL_GROUPS else live)


@pytest.mark.parametrize("machine", [live, live_with_gateways])
def test_they_fail_for_nothing_else(machine: Callable[[Random], None]) -> None:
    live_often(40, machine)
