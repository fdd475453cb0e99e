"""What every benchmark leaves behind: a table on the terminal, JSON with its circumstances, and a plot."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

SVG = "http://www.w3.org/2000/svg"

Value = str | int | float | None

LOG_WIDTH = 180
PACKAGES = ("lockstep", "torch", "triton", "transformers", "numpy", "grpcio", "fastapi", "uvicorn")


@dataclass(frozen=True)
class Series:
    """A line of the plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    logarithmic: bool = False  # both axes


@dataclass(frozen=True)
class Report:
    """A benchmark's result. `columns` name the values of each row, with their units; `notes` say how to read them."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    raw: Mapping[str, object] = field(default_factory=dict)  # every single measurement

    def show(self) -> None:
        """Prints circumstances, table and notes."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=LOG_WIDTH)  # a table in a log is not cut to the width of a terminal that is not there
        console.print("  ".join(f"{key} {value}" for key, value in circumstances().items()), style="dim", highlight=False)
        table = Table(title=self.name, title_justify="left", box=None)
        for column in self.columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*(_text(value) for value in row))
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)

    def write(self, folder: Path) -> None:
        """Writes NAME.json and, where there is a plot, NAME.svg (NAME-1.svg and so on after the first)."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"circumstances": circumstances(), **asdict(self)}
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        for number, plot in enumerate(self.plots):
            _draw(plot, folder / (f"{self.name}-{number}.svg" if number else f"{self.name}.svg"))


def circumstances() -> dict[str, str]:
    """What a figure means nothing without: time, commit, command, machine, versions."""
    facts = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
        "cpu": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "gpu": _gpu(),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not needed where this runs
    return facts


def _text(value: Value) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _commit() -> str:
    """Short hash, with a + when the working tree differs; "unknown" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    hash_ = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=False)
    return "unknown" if hash_.returncode else hash_.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _gpu() -> str:
    """Names by the driver's own tool; "none" where there is no driver."""
    try:
        query = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"
    return ", ".join(query.stdout.split("\n")[:-1])


def _draw(plot: Plot, path: Path) -> None:
    import matplotlib as mpl  # a second of import that a table does not need

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = plot.title  # the same figures, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for series in plot.series:
        axes.plot(series.x, series.y, marker="o", label=series.label)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    if plot.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    _describe(plot, path)


def _describe(plot: Plot, path: Path) -> None:
    """Adds the numbers in words, for those who do not see the picture."""
    for prefix, uri in (("", SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, uri)
    tree = ElementTree.parse(path)
    description = ElementTree.Element(f"{{{SVG}}}desc")
    lines = ["; ".join(f"{x:.4g}: {y:.4g}" for x, y in zip(series.x, series.y, strict=True)) for series in plot.series]
    labelled = [f"{series.label} - {line}" for series, line in zip(plot.series, lines, strict=True)]
    description.text = f"{plot.title}. {plot.y_label} by {plot.x_label}. " + ". ".join(labelled)
    tree.getroot().insert(0, description)
    tree.write(path, encoding="utf-8", xml_declaration=True)
