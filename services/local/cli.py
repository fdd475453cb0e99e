"""The `lockstep` command."""

import asyncio
import importlib.metadata
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from services.local.child import environment
from services.local.launcher import Launcher, Options
from services.local.support_bundle import make
from shared.command import exit_status
from shared.errors import LockstepError

app = typer.Typer(name="lockstep", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
logger = logging.getLogger("lockstep")


def print_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("lockstep"))
        raise typer.Exit


@app.callback()
def lockstep(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Lockstep serves large language models behind an OpenAI-compatible endpoint."""


@app.command()
def serve(
    model: Annotated[
        Path | None,
        typer.Argument(exists=True, file_okay=False, help="Model folder in Hugging Face's layout; without it a small demo model."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients ask for; repeat it for aliases. Default: the folder's name.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and completion together. Default: what the model allows.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.")
    ] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, max=64, help="Ranks: one GPU, or one share of the CPUs, each.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each rank. Default: its share of the CPUs.")] = None,
    host: Annotated[str, typer.Option(help="Address of the gateway; worker and scheduler stay on the loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of API keys, needed where --host is not the loopback.")
    ] = None,
    standby: Annotated[bool, typer.Option("--standby", help="Start a second scheduler, which takes over when the first is gone.")] = False,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="debug: all logs on the terminal.")] = "info",
    engine: Annotated[Literal["torch", "scripted"], typer.Option(hidden=True)] = "torch",
    script: Annotated[Path | None, typer.Option(hidden=True, exists=True, dir_okay=False)] = None,
) -> int:
    """Serve a model on this machine until Ctrl-C: worker, scheduler and gateway, with their logs in .lockstep."""
    worker = ["--dtype", dtype, "--tensor-parallel-size", str(tensor_parallel_size), "--engine", engine]
    worker += ["--max-model-len", str(max_model_len)] if max_model_len is not None else []
    worker += ["--threads", str(threads)] if threads is not None else []
    worker += ["--script", str(script.absolute())] if script is not None else []
    options = Options(
        model=model.absolute() if model is not None else None,
        served_model_names=tuple(served_model_name or ()),
        host=host,
        port=port,
        log_level=log_level,
        worker=tuple(worker),
        api_keys=api_keys.absolute() if api_keys is not None else None,
        standby=standby,
    )
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    logging.basicConfig(level="INFO", handlers=[_TerminalHandler(console)])
    logging.getLogger("httpx").setLevel("WARNING")

    async def run() -> None:
        await Launcher(options, console).run()

    try:
        asyncio.run(run())
    except LockstepError as error:
        logger.error("%s", error)
        return error.exit_status
    return 0


ARGUMENTS_OF_ANOTHER = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=ARGUMENTS_OF_ANOTHER)
def plan(arguments: typer.Context) -> int:
    """Does a model fit, on how many GPUs, and how many requests then? `lockstep plan CONFIG --gpu h200`."""
    return _program("services.worker.plan", arguments)


@app.command(context_settings=ARGUMENTS_OF_ANOTHER)
def key(arguments: typer.Context) -> int:
    """Make an API key and add its digest to a file of keys: `lockstep key NAME --file keys.json`."""
    return _program("services.gateway.key_command", arguments)


def _program(module: str, arguments: typer.Context) -> int:
    """The exit status of a program of another service, which nothing here imports."""
    return subprocess.run([sys.executable, "-m", module, *arguments.args], env=environment(), check=False).returncode


@app.command(name="support-bundle")
def support_bundle(
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Archive to write. Default: lockstep-support-TIME.tar.gz here.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Of an installation in a cluster, looked at through kubectl.")] = None,
    release: Annotated[str | None, typer.Option(help="Its Helm release. Default: all of the namespace.")] = None,
    folder: Annotated[Path, typer.Option(file_okay=False, help="Where local stacks keep run files and logs.")] = Path(".lockstep"),
) -> int:
    """Settings, metrics, last decisions and logs in one archive, without secrets, for whoever looks for a fault."""
    target = output or Path(f"lockstep-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")

    def collect() -> None:
        names = make(target, folder, namespace, release)
        print(f"{target}: {len(names)} files. Secrets were taken out by name and shape; look through it before you send it.")

    return exit_status("lockstep", collect)


class _TerminalHandler(logging.Handler):
    """Log lines above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        self._console.print(f"{level}{record.getMessage()}")


def main() -> int:
    """The exit status: 0 after a signal, 2 when something does not fit, with one line that names it, 1 for any other end."""
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:
        print(f"lockstep: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    return int(status or 0)
