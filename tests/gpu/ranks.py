"""Ranks as processes, each on a GPU: what there is between them needs more than one."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from services.worker.distributed.torch_group import ControlGroup
from shared.process import die_with_parent

DEADLINE_S = 100.0
Target = Callable[..., Any]  # (control, device, *arguments) -> what can be pickled; a function of a module


def run(target: Target, folder: Path, devices: Sequence[int], *arguments: Any) -> list[Any]:
    """What every rank returns; one rank on each of the devices, which may come twice. folder: new, and nobody else's."""
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    for rank in range(len(devices)):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(target, rank, devices, f"file://{folder / 'rendezvous'}", theirs, arguments, os.getpid())
        )
        process.start()
        theirs.close()
        links.append(ours)
        processes.append(process)
    answers = []
    try:
        for rank, link in enumerate(links):
            assert link.poll(DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
            answers.append(link.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (result, failure) in enumerate(answers):
        assert failure is None, f"rank {rank}, which returned {result}: {failure}"
    return [result for result, _ in answers]


def _serve(
    target: Target, rank: int, devices: Sequence[int], rendezvous: str, link: Connection, arguments: tuple[Any, ...], parent: int
) -> None:
    die_with_parent(parent, signal.SIGKILL)  # also in the middle of a launch that waits for ever
    device = torch.device("cuda", devices[rank])
    torch.cuda.set_device(device)
    try:
        with torch.inference_mode():
            link.send((target(ControlGroup(rank, len(devices), rendezvous, DEADLINE_S), device, *arguments), None))
    except Exception:  # the edge of the process
        link.send((None, traceback.format_exc()))
    link.poll(DEADLINE_S)  # the others may still read this rank's memory
    os._exit(0)
