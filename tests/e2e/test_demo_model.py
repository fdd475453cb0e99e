"""What a newcomer sees first: the demo model answers."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.stack import Stack


def test_the_capital_of_france(start_stack: Callable[..., Stack], demo_model: Path) -> None:
    stack = start_stack(model=demo_model)
    assert "Paris" in stack.chat("What is the capital of France?", temperature=0)
