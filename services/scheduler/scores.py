"""Log-probabilities on their way from a worker's results to a request's gateway."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import Logprobs as LogprobsMessage
from shared.protocol.logprobs import LOGPROB, MAX_TOP_LOGPROBS, NO_LOGPROBS, NO_TOP_ID, Logprobs


@dataclass(slots=True, eq=False)
class Scores:
    """What a request wants to know, and what of it has come and not been sent yet."""

    prompt_length: int
    top: int | None  # likeliest ids for each token of the completion; None: nothing is wanted of them
    prompt_top: int | None  # the same for the prompt's tokens
    scored: int = 1  # tokens of the prompt that are done with; nothing is known of the first
    first_unsent: int = field(init=False)  # position of the first of `prompt`
    prompt: Logprobs = field(default_factory=NO_LOGPROBS.copy)
    completion: list[bytes] = field(default_factory=list)  # a record each, of the tokens that have not been sent

    def __post_init__(self) -> None:
        if self.prompt_top is None:
            self.scored = self.prompt_length
        self.first_unsent = self.scored

    @property
    def needs_prompt(self) -> bool:
        """Whether the prompt's tokens have to be computed, all of them, for their own sake."""
        return self.scored < self.prompt_length

    @property
    def unsent(self) -> int:
        """Records."""
        return len(self.prompt) + len(self.completion)

    def take_prompt(self, records: Logprobs) -> bool:
        """Of a chunk, but for positions that are known already. Returns whether they were taken: all are finite.

        Raises ProtocolError when they do not follow what is known.
        """
        new = records[records["position"] >= self.scored]
        if not np.array_equal(new["position"], np.arange(self.scored, self.scored + len(new))):
            raise ProtocolError(f"log-probabilities of a prompt from {new['position'][0]} on, where {self.scored} should follow")
        if not np.isfinite(new["logprob"]).all():
            return False
        self.scored += len(new)
        self.prompt = np.concatenate((self.prompt, new))
        return True

    def take_token(self, record: bytes | None) -> None:
        """Of the completion's next token, which has come. Raises ProtocolError when something is wanted that has not."""
        if self.needs_prompt:
            raise ProtocolError(f"a token came, and log-probabilities of only {self.scored} of {self.prompt_length} prompt tokens")
        if self.top is not None:
            if record is None:
                raise ProtocolError("a token came without its log-probability")
            self.completion.append(record)

    def send_prompt(self, most: int) -> tuple[int, LogprobsMessage]:
        """Up to `most` records, which count as sent, and the position of the first."""
        first, part, self.prompt = self.first_unsent, self.prompt[:most], self.prompt[most:]
        self.first_unsent += len(part)
        top = min(self.prompt_top or 0, _alternatives(part[:1].tobytes()))
        return first, LogprobsMessage(
            values=part["logprob"].tobytes(),
            top=top,
            top_ids=part["top_ids"][:, :top].tobytes(),
            top_values=part["top_logprobs"][:, :top].tobytes(),
        )

    def send_completion(self, most: int) -> LogprobsMessage:
        """Up to `most` records, which count as sent."""
        part, self.completion = self.completion[:most], self.completion[most:]
        top = min(self.top or 0, _alternatives(part[0]))
        return LogprobsMessage(  # of bytes that are there: this is done for every token
            values=b"".join([record[_VALUE] for record in part]),
            top=top,
            top_ids=b"".join([record[_TOP_IDS : _TOP_IDS + 4 * top] for record in part]),
            top_values=b"".join([record[_TOP_VALUES : _TOP_VALUES + 4 * top] for record in part]),
        )


# By the plan's row and the token's position: a record each.
Records = dict[tuple[int, int], bytes]


def by_token(records: Logprobs) -> Records:
    data, size = records.tobytes(), LOGPROB.itemsize
    keys = zip(records["row"].tolist(), records["position"].tolist(), strict=True)
    return {key: data[at : at + size] for key, at in zip(keys, range(0, len(data), size), strict=True)}


def by_row(records: Logprobs) -> Iterator[tuple[int, Logprobs]]:
    """Runs of records of the same row."""
    if len(records):
        for part in np.split(records, np.flatnonzero(np.diff(records["row"])) + 1):
            yield int(part["row"][0]), part


def _alternatives(record: bytes) -> int:
    """How many likeliest ids it has: fewer than MAX_TOP_LOGPROBS in a vocabulary of fewer."""
    if record[_TOP_VALUES - 4 : _TOP_VALUES] != _NO_ID:
        return MAX_TOP_LOGPROBS
    return int(np.count_nonzero(np.frombuffer(record, dtype=LOGPROB)["top_ids"] != NO_TOP_ID))


def _offset(name: str) -> int:
    assert LOGPROB.fields is not None
    return int(LOGPROB.fields[name][1])


_VALUE = slice(_offset("logprob"), _offset("logprob") + 4)
_TOP_IDS, _TOP_VALUES = _offset("top_ids"), _offset("top_logprobs")
_NO_ID = np.int32(NO_TOP_ID).tobytes()
