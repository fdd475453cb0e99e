"""The demo model answers; greedy token ids through scheduler and worker equal those of transformers with the same weights in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.stack import Stack
from tests.services.scheduler.session_client import SessionClient, session, submit

NEAR_TIE = 1e-3  # of the reference's two best logits: there, a difference in the last bits may choose the other
TEXT = """
A lighthouse keeper counts the ships that pass before dawn and writes their names into a book, one line for each. When the fog
comes he counts the horns instead, and guesses. Years later a historian compares the book with the harbour's own records and finds
that the guesses were right more often than the lamps. She asks what a record is worth when nobody could have seen what it
records, and whether the keeper knew the ships by their sound. The harbour master remembers only that the coffee in the lighthouse
was strong, that the stairs were steep, and that the keeper never once asked for the day's list. Write down what you hear, he used
to say, and then write down how sure you are; the second number is the one that people forget to ask for. The book is in a museum
now. Visitors turn its pages on a screen, and a small lamp beside the screen lights up whenever a line agrees with the records. A
child once stood there for an hour, pressing the button that turns the page, and told her mother that the dark lines were better,
since somebody had to be brave to write them. The museum put that sentence on a card under the lamp. Nobody has asked who wrote it.
"""
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 100, 150, 256, 400, 600)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    ids: list[int] = AutoTokenizer.from_pretrained(demo_model)(TEXT * 4)["input_ids"]
    return [ids[3 * index : 3 * index + length] for index, length in enumerate(LENGTHS)]


class Reference:
    """The same weights in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def first_difference(self, prompt: list[int], answer: list[int]) -> int | None:
        """Where greedy decoding would have left `answer`, if anywhere. Fails unless that is a near tie."""
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for index, (token, expected) in enumerate(zip(answer, best.indices[:, 0].tolist(), strict=True)):
            if token != expected:
                gap = float(best.values[index, 0] - best.values[index, 1])
                assert gap < NEAR_TIE, f"prompt of {len(prompt)} tokens: token {index} is {token}, not {expected}; gap {gap}"
                return index
        return None

    def differences(self, prompts: list[list[int]], answers: list[list[int]]) -> int:
        """How many answers differ, each at a near tie."""
        return sum(self.first_difference(prompt, answer) is not None for prompt, answer in zip(prompts, answers, strict=True))


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


async def complete(client: SessionClient, number: int, prompt: list[int], max_tokens: int = NEW_TOKENS) -> list[int]:
    client.submit(submit(number, prompt, max_tokens, ignore_eos=True))
    answer = await client.ended(number, within_s=100)
    assert answer.finished is not None, answer.rejected
    assert len(answer.ids) == max_tokens
    return answer.ids


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), model=demo_model) as running:
        yield running


def test_the_capital_of_france(stack: Stack) -> None:
    """What a newcomer sees first."""
    assert "Paris" in stack.chat("What is the capital of France?", temperature=0)


@pytest.mark.timeout(400)
async def test_greedy_tokens_equal_transformers_alone_and_together(stack: Stack, prompts: list[list[int]], reference: Reference) -> None:
    async with session(stack.scheduler_address) as client:
        alone = [await complete(client, number, prompt) for number, prompt in enumerate(prompts)]
        for number, prompt in enumerate(prompts):
            client.submit(submit(100 + number, prompt, NEW_TOKENS, ignore_eos=True))
        together = [(await client.ended(100 + number, within_s=100)).ids for number in range(len(prompts))]
    assert reference.differences(prompts, alone) <= 1
    assert together == alone or reference.differences(prompts, together) <= 1


@pytest.mark.timeout(400)
async def test_tp_01_three_ranks_equal_transformers(
    start_stack: Callable[..., Stack], demo_model: Path, prompts: list[list[int]], reference: Reference
) -> None:
    stack = start_stack(model=demo_model, tensor_parallel_size=3)
    async with session(stack.scheduler_address) as client:
        for number, prompt in enumerate(prompts[:8]):
            client.submit(submit(number, prompt, 12, ignore_eos=True))
        got = [(await client.ended(number, within_s=200)).ids for number in range(8)]
    assert all(len(ids) == 12 for ids in got)
    assert reference.differences(prompts[:8], got) <= 1
