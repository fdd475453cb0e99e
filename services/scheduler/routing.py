"""Which group gets a request."""

from collections.abc import Iterable

from services.scheduler.group import Group
from services.scheduler.requests import Request


def choose(groups: Iterable[Group], request: Request) -> Group | None:
    """The group with the fewest requests among those that the request fits; None when it fits none."""
    return min((group for group in groups if request.max_length <= group.max_length), key=lambda group: group.load, default=None)
