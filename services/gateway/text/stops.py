"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings to be completed, wherever the pieces are cut, and holds back only what can still become one.

    Each stop is followed by Knuth, Morris and Pratt's automaton: its state is the length of the longest end of the text that begins the
    stop, so a character costs constant time and the longest state is what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched = False

    def push(self, piece: str, may_end: bool = True) -> str:
        """The text that may be shown now. After a match, which sets `matched`: what stood before the stop string, and then nothing.

        may_end: whether a stop string that this piece completes is one, or text as any other.
        """
        if self.matched or not self._stops:
            return "" if self.matched else piece
        text = self._held + piece
        for position, character in enumerate(piece, start=len(self._held) + 1):
            length = self._longest_completed(character)
            if length and may_end:
                self.matched, self._held = True, ""
                return text[: position - length]
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _longest_completed(self, character: str) -> int:
        longest = 0
        for index, stop in enumerate(self._stops):
            state, fallback = self._states[index], self._fallbacks[index]
            while state and stop[state] != character:
                state = fallback[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                longest = max(longest, state)
                state = fallback[state - 1]
            self._states[index] = state
        return longest


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of the stop: the length of its longest proper prefix that is also its end."""
    fallbacks = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = fallbacks[state - 1]
        if stop[state] == stop[index]:
            state += 1
        fallbacks[index] = state
    return fallbacks
