"""The whole path, from a client through three processes and back."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.stack import Stack


def test_random_weights_answer_alike_streamed_and_whole(start_stack: Callable[..., Stack], tiny_model: Path) -> None:
    stack = start_stack(model=tiny_model, tensor_parallel_size=2)
    whole = stack.complete("Once upon a time", max_tokens=40, temperature=0)
    with stack.stream("Once upon a time", max_tokens=40, temperature=0) as stream:
        assert "".join(stream) == whole
    assert len(stack.ranks()) == 2
    assert isinstance(stack.chat("hello", max_tokens=8), str)
