"""The `main` of a program that does one thing and ends."""

import sys
from collections.abc import Callable

from shared.errors import LockstepError


def exit_status(program: str, work: Callable[[], None]) -> int:
    """Of a program that does this: 0, 2 after a ConfigError, 1 after any other LockstepError; both are told in one line on stderr."""
    try:
        work()
    except LockstepError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_status
    return 0
