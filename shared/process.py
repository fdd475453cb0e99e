"""What a process of Lockstep owes its neighbours: it stops on signals, it dies with its parent, it tells its ports."""

import asyncio
import ctypes
import gc
import json
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

from shared.errors import PeerLost

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29  # linux/prctl.h
MAX_FILES = 1 << 20  # some systems allow a billion, and some libraries count up to what is allowed
COLLECT_AFTER = 10_000, 10, 10  # containers made and not freed; collections of the generation before, twice


def die_with_parent(parent_pid: int, sign: signal.Signals = signal.SIGTERM) -> None:
    """Asks the kernel to send `sign` to this process when its parent ends. Raises PeerLost if the parent is gone already.

    The kernel means the thread that started us: start children from the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sign), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise PeerLost(f"the parent process {parent_pid} is gone")


def allow_many_files() -> None:
    """For this process and those that it starts: each connection is an open file, of which shells allow 1024 unless they are asked."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def settle_heap() -> None:
    """Once all is loaded: what is here stays, so the garbage collector need not look at it again, and at the rest more rarely.

    A full collection stops all threads for about a microsecond an object: 200 ms, where libraries alone make 200,000 of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def precise_sleeps() -> None:
    """This thread's sleeps end when they are asked to, not up to 50 us later."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_TIMERSLACK) failed")


def stop_event_on_signals() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set; explicit handlers, since a PID 1 without them ignores both."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, stop.set)
    return stop


def write_ports(path: Path, ports: Mapping[str, int]) -> None:
    """Tells the ports that the kernel picked, in one step: a reader sees the whole file or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(dict(ports)))
    temporary.replace(path)
