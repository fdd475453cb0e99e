"""Logs of every process: standard `logging` calls, rendered by structlog as console lines or JSON. No prompt and no key belongs in one."""

import logging
import sys
from typing import Literal

import structlog


def configure(service: str, level: str, form: Literal["console", "json"]) -> None:
    """Sends all log records of this process to stderr, one line each, with time, level and service."""

    def name_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_service,
    ]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if form == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info if form == "json" else _unchanged,
                renderer,
            ],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _unchanged(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event
