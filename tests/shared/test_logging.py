"""Logs: one line a record, whatever a client put into it, and nothing of what a request said."""

import json
import subprocess
import sys

import pytest

LOG = """
import logging, sys
from shared import logging as logs

logs.configure("thing", "info", sys.argv[1])
logger = logging.getLogger("thing")
{statement}
"""


def logged(form: str, statement: str) -> str:
    """What a process that runs the statement writes to stderr."""
    command = [sys.executable, "-c", LOG.format(statement=statement), form]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("end", ["\\n", "\\r", "\\x0b", "\\x1b[2K", "\\x85", "\\u2028"])
def test_sec_08_a_client_cannot_forge_a_line(form: str, end: str) -> None:
    forged = f"mallory{end}2026-01-01T00:00:00Z [error] forged"
    output = logged(form, f"logger.info('model %s', '{forged}', extra={{'request_id': '{forged}'}})")
    assert len(output.splitlines()) == 1
    assert output.count("forged") == 2
    assert "\x1b[2K" not in output


def test_sec_08_an_exception_cannot_forge_a_line() -> None:
    error = "ValueError('mallory\\n2026-01-01T00:00:00Z [error] forged')"
    statement = f"try:\n    raise {error}\nexcept ValueError:\n    logger.exception('broke')"
    first, *rest = logged("console", statement).splitlines()
    assert "broke" in first
    assert all(line.startswith("    ") for line in rest)
    assert any("ValueError: mallory" in line for line in rest)


@pytest.mark.parametrize("form", ["console", "json"])
def test_sec_08_a_traceback_shows_no_variables(form: str) -> None:
    statement = "prompt = 'se' + 'cret'\ntry:\n    raise ValueError\nexcept ValueError:\n    logger.exception('broke')"
    output = logged(form, statement)
    assert "Traceback" in output
    assert "secret" not in output


def test_a_json_line_has_its_fields() -> None:
    record = json.loads(logged("json", "logger.info('%d done', 1, extra={'request_id': 'r-1', 'tokens': 3})"))
    assert record.pop("timestamp")
    assert record == {"event": "1 done", "level": "info", "service": "thing", "request_id": "r-1", "tokens": 3}
