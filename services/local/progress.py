"""How a start-up looks: a bar on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

PLAIN_EVERY = 0.2  # of a phase


class StartupProgress:
    """Shows the phase that start-up is in, and how far that phase is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting")
        self._phase, self._shown = "", 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, phase: str, part: float | None = None) -> None:
        """`part` of the phase is done, 0 to 1; None: nobody knows."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=phase, total=None if part is None else 1.0, completed=part or 0.0)
        elif phase != self._phase or (part or 0.0) >= self._shown + PLAIN_EVERY:
            self._phase, self._shown = phase, part or 0.0
            self._console.print(phase if not part else f"{phase} {part:.0%}")
