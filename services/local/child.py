"""A service as a child process: its output in a file, its warnings on the terminal, and an end that leaves nobody behind."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.ports import port_of, reserve

logger = logging.getLogger(__name__)

RECORD = re.compile(r"\S+ \[(?P<level>\w+) *\] (?P<text>.*?)(?: service=\S+)?")  # as shared/logging.py renders it
MAX_LINE_BYTES = 1 << 20
PORTS_EVERY_S = 0.02
LAST_OUTPUT_S = 1.0  # for what is left in the pipe of an ended child


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a child, with these variables. A folder `services` where the user happens to be is not ours: `python -m` must not look there."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **(variables or {})}


class Child:
    """`python -m services.NAME`, in a session of its own: Ctrl-C on the terminal reaches the launcher alone.

    One of several of a service has its number behind the name: `worker-1`. The child asks the kernel for SIGTERM when this process dies
    (`--parent-pid`); the kernel means the thread that starts it, which must live as long.
    """

    def __init__(
        self,
        name: str,
        host: str,
        arguments: Sequence[str],
        logs: Path,
        forward_from: int,
        variables: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        """host, port: to listen on, 0: a free one. variables: of its environment, beside ours."""
        self.name, self._service = name, name.partition("-")[0]
        self.forward_from = forward_from  # the level of logging from which its lines go to the terminal
        self._host, self._port, self._arguments, self._variables = host, port, arguments, variables
        self._log_path = logs / f"{name}.log"
        self._ports_path = logs / f"{name}-ports.json"
        self.last_line, self._last_line_was_shown = "", False
        self._level = logging.WARNING  # of the record that the lines after it belong to

    async def start(self) -> None:
        self._log_path.unlink(missing_ok=True)  # of the run before
        self._reservation = reserve(self._host, self._port)
        await self._start()

    async def start_again(self) -> None:
        """After it has ended: on the port that it had, which nobody got meanwhile, and its log goes on."""
        await self._start()

    async def _start(self) -> None:
        self._ports_path.unlink(missing_ok=True)
        common = ["--host", self._host, "--port", str(port_of(self._reservation)), "--admin-port", "0"]
        common += ["--ports-file", str(self._ports_path), "--parent-pid", str(os.getpid())]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"services.{self._service}", *common, *self._arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            env=environment(self._variables),
        )
        self.ended = asyncio.create_task(self.process.wait())
        self._follower = asyncio.create_task(self._follow())

    async def ports(self) -> dict[str, int]:
        """The ports that it has bound, once it has: `grpc` or `http`, and `admin`."""
        while not self._ports_path.exists():
            await asyncio.sleep(PORTS_EVERY_S)
        return {name: int(port) for name, port in json.loads(self._ports_path.read_text()).items()}

    async def stop(self, within_s: float, hurry: asyncio.Event) -> None:
        """Ends the child and gives up its port: SIGTERM, and SIGKILL to it and its own children after `within_s`, or at once on `hurry`."""
        if not self.ended.done():
            self.process.terminate()
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait((self.ended, hurried), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
        if not self.ended.done():
            why = "you are in a hurry" if hurry.is_set() else f"it did not stop within {within_s:g} s"
            logger.warning("killing the %s: %s", self.name, why)
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.ended
        self._reservation.close()
        await self.last_words()

    async def last_words(self) -> str:
        """The last line that it logged, when the terminal has not shown it."""
        with contextlib.suppress(TimeoutError):  # somebody who outlives it holds the pipe
            await asyncio.wait_for(self._follower, LAST_OUTPUT_S)
        return "" if self._last_line_was_shown else self.last_line

    def end_in_words(self, last_line: str) -> str:
        """How it ended, with the line that is to be told, if any, and where its log is."""
        status = self.ended.result()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        after = f": its last line was '{last_line}'" if last_line else ""
        return f"the {self.name} {how}{after}; its log is in {self._log_path.parent}"

    async def _follow(self) -> None:
        """Copies the output to the log file, and to the terminal what somebody should see."""
        assert self.process.stdout is not None
        with self._log_path.open("ab", buffering=0) as log:
            while True:
                try:
                    line = await self.process.stdout.readline()
                except ValueError:
                    line = f"(a line of more than {MAX_LINE_BYTES} bytes was dropped)\n".encode()
                if not line:
                    return
                log.write(line)
                self._show(line.decode(errors="replace").rstrip())

    def _show(self, line: str) -> None:
        """A record as its level wants; a traceback, indented, like the record that it follows; anything else means that something broke."""
        record = RECORD.fullmatch(line)
        if record or not line.startswith(" "):
            self._level = logging.getLevelNamesMapping()[record["level"].upper()] if record else logging.WARNING
            self.last_line = record["text"] if record else line
            self._last_line_was_shown = record is None or self._level >= self.forward_from
        if self._last_line_was_shown:
            logger.log(self._level, "%s: %s", self.name, line if record is None else self.last_line)
