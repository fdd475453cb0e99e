"""The `main` of a service: settings, logs, signals, exit status."""

import logging
import os
import sys
from asyncio import Event
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

from shared import logging as logs
from shared.errors import LockstepError
from shared.process import die_with_parent, stop_event_on_signals
from shared.settings import Settings, load_or_exit

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=Settings)


def run(program: str, settings_class: type[S], serve: Callable[[S, Event], Awaitable[None]]) -> None:
    """`run_with` the settings of environment and command line."""
    run_with(program, load_or_exit(settings_class, program), serve)


def run_with(program: str, settings: S, serve: Callable[[S, Event], Awaitable[None]]) -> None:
    """Runs `serve(settings, stop)` until it returns; it should when `stop` is set, which SIGINT and SIGTERM do.

    Ends the process: status 0 after `serve` returned, 2 after a ConfigError, 1 after any other LockstepError; both told in one line.
    """
    logs.configure(program, settings.log_level, settings.log_format)

    async def main() -> None:
        stop = stop_event_on_signals()
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        await serve(settings, stop)

    status = 0
    try:
        uvloop.run(main())
    except LockstepError as error:
        logger.error("%s", error, exc_info=settings.log_level == "debug")  # one line, unless somebody debugs
        status = error.exit_status
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: grpc's threads may hold the interpreter back
