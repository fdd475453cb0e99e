"""`python -m benchmarks NAME`: everything that prints a figure."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import models, tune, tune_attention, tune_head, tune_library
from benchmarks.allreduce import SIZES, allreduce
from benchmarks.capacity import capacity
from benchmarks.comparison import comparison
from benchmarks.crowd import crowd
from benchmarks.deterministic import deterministic
from benchmarks.distance import distance
from benchmarks.endurance import endurance
from benchmarks.fleet import fleet
from benchmarks.gateway import gateway
from benchmarks.goodput import goodput
from benchmarks.hops import hops
from benchmarks.kernels import kernels
from benchmarks.models import OF_PEERS, Cases
from benchmarks.overhead import overhead
from benchmarks.peers import PEERS
from benchmarks.planning import planning
from benchmarks.profile import profile
from benchmarks.report import Report
from benchmarks.sampling import ALL, GREEDY
from benchmarks.served import Options
from benchmarks.streaming import streaming
from benchmarks.tiles import tiles
from benchmarks.tune_experts import TOKENS, tune_experts
from benchmarks.virtual_fleet import Fleet, Load, Objectives
from kernels.launch import allow_pdl
from services.scheduler.policy import POLICIES, PolicyName
from shared.errors import ConfigError, LockstepError
from shared.process import settle_heap

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="Folder for the JSON, the plots, and the logs of what is started.")]
OUT = Path("build/benchmarks")
Model = Annotated[list[str], typer.Option(help="A shape of benchmarks/shapes or a folder with a config.json; repeatable.")]
MODELS = sorted(PEERS)  # those that others were measured with
Rows = Annotated[list[int], typer.Option(min=1, help="Rows that decode at a time; repeatable.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quick = Annotated[bool, typer.Option("--quick", help="One run of each line.")]
Limit = Annotated[float, typer.Option(min=1, help="Seconds for each model, its start included; lines that do not fit are left out.")]
Worker = Annotated[list[str], typer.Option(help="A setting of the worker, as in cuda_graphs=false; repeatable.")]


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


@app.command("streaming")
def _streaming(
    streams: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 256,
    step_ms: Annotated[float, typer.Option(min=0.1, help="A stream gets a token in each step of so long.")] = 10.0,
    tokens: Annotated[int, typer.Option(min=1, help="Of each stream.")] = 1000,
    out: Out = OUT,
) -> None:
    """Tokens per second that one gateway process streams, beside a bare uvicorn application at the same pace."""
    _finish(streaming(streams, step_ms, tokens), out)


@app.command("endurance")
def _endurance(
    streams: Annotated[int, typer.Option(min=1, help="Open at a time.")] = 1000,
    rate: Annotated[float, typer.Option(min=0.1, help="Short requests a second beside them.")] = 50.0,
    seconds: Annotated[float, typer.Option(min=5, help="For so long.")] = 120.0,
    out: Out = OUT,
) -> None:
    """A gateway with very many open streams, short requests, and a client that never reads: errors, memory, health."""
    _finish(endurance(streams, rate, seconds), out)


@app.command("planning")
def _planning(
    plans: Annotated[int, typer.Option(min=1, help="Of each run.")] = 1_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each number of requests.")] = 5,
    out: Out = OUT,
) -> None:
    """What a plan and its result cost the scheduler, by the number of running requests."""
    _finish(planning(plans, repeats), out)


@app.command("crowd")
def _crowd(repeats: Annotated[int, typer.Option(min=1, help="Of each crowd.")] = 30, out: Out = OUT) -> None:
    """What scheduler and worker compute for prompts that come together, before their step and after it."""
    settle_heap()  # as the services do
    _finish(crowd(repeats), out)


@app.command("hops")
def _hops(out: Out = OUT) -> None:
    """What a message costs between two processes of one host, by its size."""
    _finish(hops(), out)


@app.command("capacity")
def _capacity(
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 100.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="On average.")] = 500,
    output_tokens: Annotated[int, typer.Option(min=2, help="On average.")] = 200,
    ttft_ms: Annotated[float, typer.Option(min=1, help="Objective: time to first token.")] = 500.0,
    tpot_ms: Annotated[float, typer.Option(min=1, help="Objective: time per token after the first.")] = 25.0,
    share: Annotated[float, typer.Option(min=0.5, max=1, help="Of the requests, that must meet both.")] = 0.95,
    model: Annotated[str, typer.Option(help="0.6b, 8b or 14b.")] = "8b",
    gpu: Annotated[str, typer.Option(help="a100, h100, h200 or l40s.")] = "h200",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of a group.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that a group computes at a time.")] = 256,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 512,
    delay_ms: Annotated[float, typer.Option(min=0, help="Between scheduler and groups, one way.")] = 1.0,
    groups_per_scheduler: Annotated[int, typer.Option(min=1, help="That one scheduler drives, at most; further ones get their own.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="Virtual time of a run.")] = 10.0,
    out: Out = OUT,
) -> None:
    """How many groups a load needs to meet its objectives: the scheduler and simulated groups on a virtual clock."""
    fleet = Fleet(0, groups_per_scheduler, gpu, model, tensor_parallel_size, max_num_seqs, max_step_tokens, round(delay_ms * 1e3))
    load, objectives = Load(rate, prompt_tokens, output_tokens), Objectives(ttft_ms / 1e3, tpot_ms / 1e3, share)
    _finish(capacity(fleet, load, objectives, seconds), out)


@app.command("fleet")
def _fleet(
    groups: Annotated[int, typer.Option(min=1, help="Simulated groups.")] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Requests that each decodes at a time.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="Of measuring.")] = 10.0,
    out: Out = OUT,
) -> None:
    """How much of a scheduler's process a fleet of simulated groups takes, over real gRPC."""
    _finish(fleet(groups, rows, seconds), out)


@app.command("goodput")
def _goodput(
    rate: Annotated[list[float], typer.Option(min=0.1, help="New conversations a second; repeatable.")] = [10, 20, 25, 30, 35, 40],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="mixed, prefill-first or decode-first; repeatable.")] = ["mixed", "prefill-first"],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=5, help="Virtual time of a run.")] = 20.0,
    out: Out = OUT,
) -> None:
    """Conversations with shared beginnings: what policies make of them, and what the prefix cache finds. On a virtual clock."""
    _finish(goodput(rate, _policies(policy), seconds), out)


def _policies(names: list[str]) -> list[PolicyName]:
    unknown = set(names) - set(POLICIES)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(POLICIES)}")
    return [name for name in POLICIES if name in names]


@app.command("distance")
def _distance(
    model: Annotated[list[str], typer.Option(help="0.6b, 8b or 14b; repeatable.")] = ["0.6b", "8b"],  # noqa: B006
    rows: Rows = [1, 32, 256],  # noqa: B006
    delay_ms: Annotated[list[float], typer.Option(min=0, help="One way; the first is what others are compared with.")] = [0, 1, 5],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each of a run's two loads.")] = 2.5,
    out: Out = OUT,
) -> None:
    """What a distance between scheduler and worker costs, with a simulated H200 and a proxy that delays every byte."""
    _finish(distance(model, rows, delay_ms, repeats, seconds), out)


@app.command("decode")
def _decode(
    model: Model = MODELS,
    rows: Rows = list(Cases.rows),  # noqa: B006
    context: Context = Cases.context,
    tokens: Steps = Cases.tokens,
    device: Device = "auto",
    quick: Quick = False,
    limit_s: Limit = Options.limit_s,
    worker: Worker = [],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Milliseconds a step, by the number of rows, through scheduler and worker."""
    cases = Cases(names=("decode",), rows=tuple(rows), context=context, tokens=tokens)
    _measure(model, cases, _options(device, quick, limit_s, worker), out)


@app.command("prefill")
def _prefill(
    model: Model = MODELS,
    prompts: Annotated[int, typer.Option(min=1, help="That come together.")] = Cases.prefill_prompts,
    context: Context = Cases.context,
    device: Device = "auto",
    quick: Quick = False,
    limit_s: Limit = Options.limit_s,
    worker: Worker = [],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Time to the last first token of prompts that come together, through scheduler and worker."""
    cases = Cases(names=("prefill",), context=context, prefill_prompts=prompts)
    _measure(model, cases, _options(device, quick, limit_s, worker), out)


@app.command("offline")
def _offline(
    model: Model = MODELS,
    prompts: Annotated[int, typer.Option(min=1, help="All at once.")] = Cases.prompts,
    least: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and new ones.")] = Cases.least,
    most: Annotated[int, typer.Option(min=1, help="As before; uniform between the two.")] = Cases.most,
    device: Device = "auto",
    quick: Quick = False,
    limit_s: Limit = Options.limit_s,
    worker: Worker = [],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Output tokens a second of many prompts at once, through scheduler and worker."""
    cases = Cases(names=("offline",), prompts=prompts, least=least, most=most)
    _measure(model, cases, _options(device, quick, limit_s, worker), out)


@app.command("sampling")
def _sampling(
    model: Model = MODELS,
    rows: Rows = [256],  # noqa: B006
    context: Context = Cases.context,
    tokens: Steps = Cases.tokens,
    device: Device = "auto",
    quick: Quick = False,
    limit_s: Limit = Options.limit_s,
    worker: Worker = [],  # noqa: B006
    out: Out = OUT,
) -> None:
    """What temperature, filters, penalties and log-probabilities of all rows add to a greedy step."""
    cases = Cases(names=("sampling",), sampling_rows=tuple(rows), context=context, tokens=tokens)
    _measure(model, cases, _options(device, quick, limit_s, worker), out)


@app.command("deterministic")
def _deterministic(
    model: Model = ["Qwen3-0.6B"],  # noqa: B006
    rows: Rows = [1, 256],  # noqa: B006
    context: Context = Cases.context,
    tokens: Steps = Cases.tokens,
    device: Device = "auto",
    quick: Quick = False,
    limit_s: Limit = Options.limit_s,
    worker: Worker = [],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Milliseconds a step with the worker's deterministic mode and without."""
    cases = Cases(names=("decode",), rows=tuple(rows), context=context, tokens=tokens)
    _finish(deterministic(model, cases, _options(device, quick, limit_s, worker)), out)


@app.command("peers")
def _peers(
    model: Model = MODELS,
    device: Device = "auto",
    quick: Quick = False,
    limit_s: Limit = Options.limit_s,
    worker: Worker = [],  # noqa: B006
    sampling: Annotated[bool, typer.Option("--sampling", help="Also what sampling with penalties adds to a step of 256 rows.")] = False,
    gaps: Annotated[bool, typer.Option("--gaps", help="Also for how long nothing runs on the device, in steps of 1 and 256 rows.")] = False,
    out: Out = OUT,
) -> None:
    """The offline task, prefill and decode of each model after one start, beside what other engines reach."""
    names = OF_PEERS + ("sampling",) * sampling + ("gaps",) * gaps
    _measure(model, Cases(names, ways=(GREEDY, ALL)), _options(device, quick, limit_s, worker), out)


@app.command("comparison")
def _comparison(
    folders: Annotated[list[Path], typer.Argument(help="What `peers --out` wrote; of a line in several of them the last counts.")],
    out: Out = OUT,
) -> None:
    """Ours beside the best peer, as tables of Markdown and a plot, from what `peers` has measured."""
    tables, report = comparison(folders)
    print(tables)
    report.write(out)


@app.command("profile")
def _profile(
    model: Annotated[str, typer.Option(help="A shape of benchmarks/shapes or a folder with a config.json.")] = "Qwen3-0.6B",
    rows: Rows = [1, 32, 256],  # noqa: B006
    prompts: Annotated[int, typer.Option(min=0, help="New ones that come together, for a profile of their prefill; 0: none.")] = 16,
    context: Context = Cases.context,
    device: Device = "auto",
    worker: Worker = [],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Where a step goes, with prefill and without: time and launches by kernel, and gaps between them, by torch's profiler in the rank."""
    for report in profile(model, rows, prompts, context, _options(device, False, Options.limit_s, worker), out):
        _finish(report, out)


@app.command("kernels")
def _kernels(
    operations: Annotated[list[str] | None, typer.Argument(help="Which; without any, all.")] = None,
    pdl: Annotated[bool, typer.Option(help="Programmatic dependent launch.")] = True,
    out: Out = OUT,
) -> None:
    """What each kernel reaches of what the GPU can do."""
    allow_pdl(pdl)
    _finish(kernels(operations or []), out)


@app.command("allreduce")
def _allreduce(
    ranks: Annotated[int, typer.Option(min=2, help="Each on a GPU of its own.")] = 2,
    size: Annotated[list[int], typer.Option(min=256, help="Bytes; repeatable.")] = list(SIZES),  # noqa: B006
    out: Out = OUT,
) -> None:
    """Sums over GPUs, ours and NCCL's, by size, in CUDA graphs; with the residual and norm behind them, too."""
    for report in allreduce(ranks, size):
        _finish(report, out)


@app.command("tune")
def _tune(
    model: Model = MODELS,
    rows: Annotated[list[int], typer.Option(min=1, max=256, help="Most rows of an entry; repeatable.")] = list(tune.ROWS),  # noqa: B006
    tensor_parallel_size: Annotated[list[int], typer.Option(min=1, help="Ranks of a group, whose shares are tuned; repeatable.")] = [1],  # noqa: B006
    limit_s: Annotated[float, typer.Option(min=1, help="When to stop; what is not reached stays as it is.")] = 600.0,
    out: Out = OUT,
) -> None:
    """The fastest configurations of the products of few rows, as the table that the kernels read."""
    _finish(tune.tune(model, rows, tensor_parallel_size, limit_s, out), out)


@app.command("tune-library")
def _tune_library(
    model: Model = MODELS,
    rows: Annotated[list[int], typer.Option(min=1, help="Most rows of an entry; repeatable.")] = list(tune_library.ROWS),  # noqa: B006
    tensor_parallel_size: Annotated[list[int], typer.Option(min=1, help="Ranks of a group, whose shares are tuned; repeatable.")] = [1],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Where cuBLASLt is faster than cuBLAS and our products, as the table that the kernels read."""
    _finish(tune_library.tune_library(model, rows, tensor_parallel_size, out), out)


@app.command("tune-head")
def _tune_head(
    model: Model = MODELS,
    rows: Annotated[list[int], typer.Option(min=1, help="Most rows of an entry; repeatable.")] = list(tune_head.ROWS),  # noqa: B006
    tensor_parallel_size: Annotated[list[int], typer.Option(min=1, help="Ranks of a group, whose shares are tuned; repeatable.")] = [1],  # noqa: B006
    limit_s: Annotated[float, typer.Option(min=1, help="When to stop; what is not reached stays as it is.")] = 600.0,
    out: Out = OUT,
) -> None:
    """Where the head chooses tokens as it multiplies, and by what tiles, as the table that the kernels read."""
    _finish(tune_head.tune_head(model, rows, tensor_parallel_size, limit_s, out), out)


@app.command("tune-experts")
def _tune_experts(
    model: Model = ["Qwen3-30B-A3B"],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(min=1, help="Most tokens of an entry; repeatable.")] = list(TOKENS),  # noqa: B006
    limit_s: Annotated[float, typer.Option(min=1, help="When to stop; what is not reached stays as it is.")] = 600.0,
    out: Out = OUT,
) -> None:
    """The fastest configurations of a mixture of experts, as the table that the kernels read."""
    _finish(tune_experts(model, tokens, limit_s, out), out)


@app.command("tune-attention")
def _tune_attention(
    model: Model = MODELS,
    rows: Annotated[list[int], typer.Option(min=1, help="Most rows of an entry; repeatable.")] = list(tune_attention.SHARES),  # noqa: B006
    out: Out = OUT,
) -> None:
    """How decode attention of few rows is cut, and whether it rotates, as the table that the kernels read."""
    _finish(tune_attention.tune_attention(model, rows, out), out)


@app.command("tiles")
def _tiles(out: Out = OUT) -> None:
    """What tile configurations of prefill attention take."""
    _finish(tiles(), out)


def _options(device: str, quick: bool, limit_s: float, worker: list[str]) -> Options:
    """Raises ConfigError for a setting without a value."""
    settings: dict[str, str | int] = {}
    for setting in worker:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"worker: NAME=VALUE, got {setting}")
        settings[name] = int(value) if value.isdecimal() else value
    return Options(device, quick, limit_s, settings)


def _measure(names: list[str], cases: Cases, options: Options, out: Path) -> None:
    """Status 1 when something of it failed."""
    reports, failures = models.measure_models(names, cases, replace(options, logs=out / "logs"))
    for report in reports:
        _finish(report, out)
    for failure in failures:
        print(f"failed: {failure}")
    if failures:
        raise typer.Exit(1)


def _finish(report: Report, out: Path) -> None:
    report.show()
    report.write(out)
    print(f"written to {out / report.name}.json")


def main() -> None:
    """Status 2 for what does not fit and 1 for what breaks, told in one line."""
    try:
        app()
    except LockstepError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error


if __name__ == "__main__":
    main()
