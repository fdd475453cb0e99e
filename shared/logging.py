"""Logs of every process: standard `logging` calls, rendered by structlog as console lines or JSON. No prompt and no key belongs in one.

What belongs to one request carries the field `request_id`, the same in every service: by `extra=`, or bound for a whole task.
"""

import logging
import sys
import textwrap
from typing import Literal

import structlog

# Control characters, the next line and the line separators of Unicode: nothing that a client sends can begin a line of its own.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_ESCAPES_BUT_NEWLINE = {code: escape for code, escape in _ESCAPES.items() if code != ord("\n")}


def bind(**fields: str) -> None:
    """Adds fields to every record of the current task, and of those that it starts."""
    structlog.contextvars.bind_contextvars(**fields)


def configure(service: str, level: str, form: Literal["console", "json"]) -> None:
    """Sends all log records of this process to stderr, one line each, with time, level and service."""

    def name_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_service,
        structlog.processors.format_exc_info,  # here, and plain: other renderers show local variables, prompts and keys among them
    ]
    renderers: list[structlog.typing.Processor] = [structlog.processors.JSONRenderer()]
    if form == "console":
        plain = structlog.dev.plain_traceback
        renderers = [_on_its_line, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=plain)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _on_its_line(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A record is one line; a traceback follows it, indented."""
    for key, value in event.items():
        if key == "exception":
            event[key] = textwrap.indent(str(value).translate(_ESCAPES_BUT_NEWLINE), "    ")
        elif isinstance(value, str):
            event[key] = value.translate(_ESCAPES)
    return event
