"""How far a start has come."""

from services.worker.startup import Startup


def test_a_group_has_come_as_far_as_its_slowest_rank() -> None:
    startup = Startup()
    startup.advance(0, "starting ranks", 0.0)
    startup.expect(1, "waiting for node 1")
    assert startup.slowest == ("waiting for node 1", 0.0)
    startup.advance(1, "starting ranks", 0.0)
    startup.advance(0, "loading weights", 0.25)
    assert startup.slowest == ("starting ranks", 0.0)
    startup.advance(1, "loading weights", 0.5)
    assert startup.slowest == ("loading weights", 0.25)
    startup.advance(0, "capturing graphs", 0.0)
    assert startup.slowest == ("loading weights", 0.5)
