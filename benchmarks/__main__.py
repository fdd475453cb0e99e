"""`python -m benchmarks NAME`: everything that prints a figure."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gateway import gateway
from benchmarks.overhead import overhead
from benchmarks.report import Report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="Folder for the JSON and the plots.")]
OUT = Path("build/benchmarks")


@app.callback()
def benchmarks() -> None:
    """Measures Lockstep. Each benchmark prints a table and writes JSON with versions, commit and command, and a plot."""


@app.command("overhead")
def _overhead(
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of runs.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each run.")] = 64,
    out: Out = OUT,
) -> None:
    """Time per token through HTTP against the same engine stepped in one process."""
    _finish(overhead(pairs, tokens), out)


@app.command("gateway")
def _gateway(
    streams: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1000,
    out: Out = OUT,
) -> None:
    """What the gateway adds to a token, and stalls of its event loop, with an engine that plays a script."""
    _finish(gateway(streams, tokens), out)


def _finish(report: Report, out: Path) -> None:
    report.show()
    report.write(out)
    print(f"written to {out / report.name}.json")


if __name__ == "__main__":
    app()
