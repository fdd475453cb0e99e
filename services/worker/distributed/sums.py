"""What the ranks' first sums have told, for the supervisor: no torch here."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

SHM = Path("/dev/shm")
TESTING = "testing sums by "  # begins the phase of the preflight; a transport follows


@dataclass(frozen=True)
class SumTime:
    """What an all-reduce took, when several followed each other."""

    transport: str
    ranks: int
    size: int  # bytes
    seconds: float

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that every rank must have sent at least: as NCCL's own tests count."""
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.seconds


@dataclass(frozen=True)
class Sums:
    """How a rank adds up with the others."""

    times: tuple[SumTime, ...] = ()
    fell_back: bool = False  # small sums should go through peer memory and cannot

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """From what `asdict` made of it."""
        return cls(tuple(SumTime(**each) for each in content["times"]), content["fell_back"])


def hints(transport: str, environment: Mapping[str, str] | None = None) -> str:
    """What to look at and to set when a transport fails. environment: this process's, if None."""
    environment = os.environ if environment is None else environment
    told = []
    if "peer memory" in transport:
        told.append("--peer-memory false leaves all sums to NCCL")
    if "nccl" in transport:
        shm = f"{shutil.disk_usage(SHM).total >> 20} MiB" if SHM.is_dir() else "none"
        ours = ", ".join(f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith("NCCL_")) or "nothing"
        told += [
            "NCCL_DEBUG=INFO logs the way that NCCL takes",
            "where ACS or an IOMMU breaks access between GPUs, NCCL_P2P_DISABLE=1",
            f"where {SHM} ({shm} here) is small, more of it or NCCL_SHM_DISABLE=1",
            "over nodes, NCCL_SOCKET_IFNAME and NCCL_IB_DISABLE=1",
            f"set is {ours}",
        ]
    if "gloo" in transport:
        interface = environment.get("GLOO_SOCKET_IFNAME", "nothing")
        told.append(f"GLOO_SOCKET_IFNAME, now {interface}, names the interface that reaches all ranks")
    return "; ".join(told)
