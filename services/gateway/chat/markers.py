"""Markers in a text that comes in pieces, perhaps cut within one."""


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """What stands before the first of the markers, that marker, and what follows; without any: the text but its end, which may become
    one, "", that end."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    longest = max(_begun(text, marker) for marker in markers)
    return text[: len(text) - longest], "", text[len(text) - longest :]


def _begun(text: str, marker: str) -> int:
    """The length of the longest end of the text that may become the marker."""
    return next((length for length in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:length])), 0)


def is_start(text: str, marker: str) -> bool:
    """Whether the text may become the marker."""
    return len(text) < len(marker) and marker.startswith(text)
