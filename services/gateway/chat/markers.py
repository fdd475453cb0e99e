"""Markers in a text that comes in pieces, perhaps cut within one."""


def split_at(text: str, marker: str) -> tuple[str, str, str]:
    """What stands before the marker, the marker, and what follows; without it: the text but its end, which may become one, "", that end."""
    before, found, after = text.partition(marker)
    if found:
        return before, found, after
    longest = next((length for length in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:length])), 0)
    return text[: len(text) - longest], "", text[len(text) - longest :]


def is_start(text: str, marker: str) -> bool:
    """Whether the text may become the marker."""
    return len(text) < len(marker) and marker.startswith(text)
