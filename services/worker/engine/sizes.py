"""The sizes that steps are filled up to: those that are captured, and the few in which others are launched.

A size more is a graph more to capture at every start and to keep; a size less means more that is computed for nobody. So from
512 prompt tokens on there are eight sizes an octave, which wastes a ninth at most, and the more prompt tokens, the fewer sizes
of decode rows beside them.

S slots.
"""

from bisect import bisect_left
from typing import NamedTuple

ALIGNED = 16  # of all counts that a kernel is given, so that it is compiled once: Triton compiles anew for counts that 16 divides
SMALL = (16, 32, 64, 128, 192, 256, 384, 512)  # prompt tokens of steps that take little longer than their weights' reading
OCTAVE_SIZES = 8
# Rows with prompt tokens, one of nobody among them, by the most tokens. Programs of rows without tokens end at once.
ROWS = {128: 16, 512: 32, 4096: 64}
MOST_ROWS = 128
MOST_FILLING = 2  # times a step's own tokens, past the small sizes: many short prompts had better be launched than fill up a large size


class Prefill(NamedTuple):
    """What the prefill of a step is filled up to."""

    rows: int  # one of nobody at least, which takes the tokens that are missing
    tokens: int


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def decode_sizes(slots: int) -> list[int]:
    """Sizes of decode batches that are captured: close where a row more costs much, the last one for all slots."""
    steps = (*(1, 2, 4), *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, slots, 64))
    return [size for size in steps if size < slots] + [slots]


def prompt_sizes(most: int) -> list[int]:
    """Prompt tokens of captured steps, the last size holds `most`; none for 0."""
    if not most:
        return []
    sizes = list(SMALL)
    while sizes[-1] < most:
        octave = 1 << sizes[-1].bit_length() - 1
        sizes.append(sizes[-1] + octave // OCTAVE_SIZES)
    return sizes[: bisect_left(sizes, most) + 1]


def sizes_beside(tokens: int, slots: int) -> list[int]:
    """Numbers of decode rows beside so many captured prompt tokens: as far apart as a tenth of all tokens, or as small steps can bear."""
    sizes = [0]
    while (last := sizes[-1]) < slots:
        most = last + max(tokens // OCTAVE_SIZES, min(3 * last, 64), last // 2, 4)
        sizes.append(max(size for size in decode_sizes(slots) if size <= most))
    return sizes


def launched_rows(prefills: int) -> int:
    """Rows, one of nobody among them, of steps that are launched kernel by kernel: kernels are compiled for their number."""
    return max(1 << prefills.bit_length(), ALIGNED)


def most_rows(slots: int) -> int:
    """Of any step: with prefill as it is launched, all other slots decoding beside it, or as it is captured, beside all slots."""
    launched = max(launched_rows(prefills) + aligned(slots - prefills) for prefills in range(1, slots + 1))
    return max(launched, min(MOST_ROWS, launched_rows(slots)) + aligned(slots))


class PrefillSizes:
    """Of a group: the least captured size that holds a step's prefill, or one that is launched."""

    def __init__(self, slots: int, most: int) -> None:
        """most: prompt tokens of captured steps; 0: none is captured."""
        self._most_rows = launched_rows(slots)
        self.captured = [Prefill(self._rows(tokens), tokens) for tokens in prompt_sizes(most)]

    def of(self, prefills: int, tokens: int) -> Prefill:
        """For so many rows with so many tokens together."""
        most = max(MOST_FILLING * tokens, SMALL[-1])
        found = next((size for size in self.captured if tokens <= size.tokens <= most and size.rows > prefills), None)
        return found or Prefill(launched_rows(prefills), aligned(tokens))

    def _rows(self, tokens: int) -> int:
        return min(next((rows for most, rows in ROWS.items() if tokens <= most), MOST_ROWS), self._most_rows)
