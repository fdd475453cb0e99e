import numpy as np

from services.scheduler.tenants import MAX_IDLE, Tenants


def charge(tenants: Tenants, index: int, tokens: int) -> None:
    tenants.charge(np.array([index], dtype=np.int32), tokens)


def test_a_newcomer_begins_at_the_least_of_those_that_are_here() -> None:
    tenants = Tenants()
    for name, tokens in (("a", 100), ("b", 50)):
        charge(tenants, tenants.join(name), tokens)
    tenants.join("c")
    assert [tenants.computed(name) for name in "abc"] == [100, 150, 100]


def test_a_debt_stays_and_rows_of_one_tenant_add_up() -> None:
    tenants = Tenants()
    debtor, other = tenants.join("debtor"), tenants.join("other")
    tenants.charge(np.array([debtor, debtor, other]), 4)
    tenants.leave("debtor")
    assert tenants.join("debtor") == debtor
    assert tenants.computed("debtor") == 8


def test_tenants_that_are_gone_are_forgotten_in_the_end() -> None:
    tenants = Tenants()
    for number in range(MAX_IDLE + 500):
        charge(tenants, tenants.join(f"tenant-{number}"), 1)
        tenants.leave(f"tenant-{number}")
    assert len(tenants._index) == MAX_IDLE
    assert tenants.computed("tenant-0") == 0
