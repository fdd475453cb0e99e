"""Stop strings: nothing of them leaks, wherever the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


@pytest.mark.parametrize(
    "stops, pieces, shown",
    [
        (["DEFGHIJ"], ["ABC", "DEF", "GHIJ", "K"], ["ABC", "", "", "", ""]),
        (["world"], [" worldwide"], [" ", ""]),
        (["\n\n"], ["end.\n", "\nA"], ["end.", "", ""]),
        (["d", "b"], ["a ", "b ", "c "], ["a ", "", "", ""]),
        (["d", "b"], ["a b c d"], ["a ", ""]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""]),
        (["xyz", "yz"], ["w", "xy", "z"], ["w", "", "", ""]),  # both end at once: the one that begins first
        (["ZZZZ"], ["no", " such"], ["no", " such", ""]),
        (["abc"], ["xab", "ab"], ["x", "ab", "ab"]),
    ],
)
def test_what_is_shown(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    assert run(stops, pieces)[0] == shown


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_the_first_stop_to_be_complete_ends_the_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text
    if ends:
        longest = max((stop for stop in stops if text[: min(ends)].endswith(stop)), key=len)
        expected = text[: min(ends) - len(longest)]
    shown, matched = run(stops, pieces)
    assert ("".join(shown), matched) == (expected, bool(ends))


def test_what_is_no_end_yet_is_text() -> None:
    matcher = StopMatcher(["aba"])
    assert [matcher.push("xaba", may_end=False), matcher.push("b"), matcher.matched] == ["xab", "", False]
    assert [matcher.push("a"), matcher.matched] == ["", True]  # the end of what was text has begun it


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), pieces=st.lists(st.text("ab", max_size=3), max_size=9)
)
def test_no_more_is_held_back_than_can_become_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if matcher.matched:
            return
        held = text[len(shown) :]
        longest = max((length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])), default=0)
        assert len(held) == longest
