"""How many CPUs the ranks of a pod have. A limit of the cgroup counts: threads beyond it are throttled, and the others wait for them."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # in a container: its own


def available(cgroup: Path = CGROUP) -> int:
    """CPUs that this process may run on, or whole ones of its cgroup's quota when those are fewer; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota(cgroup)))


def _quota(cgroup: Path) -> int:
    """Rounded down: a thread too many is throttled with all that wait for it. Without a quota more than any machine has."""
    unlimited = 1 << 20
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()  # version 2, in us, or "max"
    except FileNotFoundError:
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except FileNotFoundError:
            return unlimited
    return unlimited if quota in ("max", "-1") else int(quota) // int(period)
