"""`lockstep serve` as a process, for tests."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import Family, eventually

READY_S = 60.0
END_S = 20.0


class Launched:
    """`lockstep ARGUMENTS` in a folder of its own, leading a process group as a foreground job of a shell does."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder, self._output_file = folder, folder / "output"
        self.family = Family()
        with self._output_file.open("w") as output:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("lockstep")), *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.family.environment, **environment},
                process_group=0,
            )

    @property
    def output(self) -> str:
        return self._output_file.read_text()

    @property
    def run_files(self) -> list[Path]:
        return list(self.folder.glob(".lockstep/run-*.json"))

    def says(self, text: str) -> None:
        """Waits until it has said this."""
        eventually(lambda: text in self.output or self.process.poll() is not None, READY_S)
        assert text in self.output

    def ready(self) -> dict[str, Any]:
        """What the run file tells, once it is there."""
        eventually(lambda: self.run_files or self.process.poll() is not None, READY_S)
        (run_file,) = self.run_files
        content: dict[str, Any] = json.loads(run_file.read_text())
        return content

    def press_ctrl_c(self) -> None:
        """What the terminal does: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """The exit status, once it and everything that it has started are gone."""
        status = self.process.wait(END_S)
        self.family.end()
        return status

    def clean_up(self) -> None:
        """After a test, also one that failed: nobody stays."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.family.end()
        print(self.output)
        for log in sorted(self.folder.glob(".lockstep/logs-*/*.log")):
            print(f"---- {log.name}\n{log.read_text()}")
