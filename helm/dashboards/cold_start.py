"""What worker groups do until they are ready, and how long."""

from helm.dashboards.queries import DEVICE, NEUTRAL, stat, states, total
from helm.grafana import NAMESPACE, Dashboard, Panel, Query, Row


def cold_start() -> Dashboard:
    ready = f"lockstep_worker_ready{{{DEVICE}}}"
    now = Row(
        "Now",
        [
            stat("Ready", "Worker groups that can compute.", "short", f"sum({ready})", 6, states()),
            stat("Starting", "Worker groups that cannot yet.", "short", f"count({ready}) - sum({ready})", 6),
            stat(
                "Longest start",
                "Seconds in all phases together, of the slowest pod.",
                "s",
                f"max(sum by (engine, instance) (lockstep_worker_startup_seconds{{{DEVICE}}}))",
                6,
            ),
            stat(
                "Least progress",
                "Of the phases that the groups are in.",
                "percentunit",
                f"min(lockstep_worker_startup_progress_ratio{{{DEVICE}}})",
                6,
            ),
        ],
    )
    phases = Row(
        "Phases",
        [
            Panel(
                "Time by phase",
                "Of the group that took longest for it. The one that grows is where a start hangs.",
                "s",
                [Query(f"max by (phase) (lockstep_worker_startup_seconds{{{DEVICE}}})", "{{phase}}")],
                12,
                "bargauge",
                NEUTRAL,
            ),
            Panel(
                "Ready",
                "Which groups can compute.",
                "none",
                [Query(f"max by (engine) ({ready})", "{{engine}}")],
                12,
                "state-timeline",
                NEUTRAL,
            ),
            Panel(
                "Time by phase and group",
                "As it grows.",
                "s",
                [Query(f"max by (engine, phase) (lockstep_worker_startup_seconds{{{DEVICE}}})", "{{engine}}: {{phase}}")],
                12,
                stacked=True,
            ),
            Panel(
                "Progress",
                "Share of the current phase that is done.",
                "percentunit",
                [Query(f"min by (engine) (lockstep_worker_startup_progress_ratio{{{DEVICE}}})", "{{engine}}")],
                12,
                most=1,
            ),
        ],
    )
    memory = Row(
        "Memory",
        [
            Panel(
                "Device memory",
                "Of all ranks, by use.",
                "bytes",
                [Query(total("lockstep_worker_device_memory_bytes", DEVICE, "use"), "{{use}}")],
                8,
                stacked=True,
            ),
            Panel(
                "Main memory of ranks",
                "While weights are loaded, and after.",
                "bytes",
                [Query(f"lockstep_worker_rank_resident_memory_bytes{{{DEVICE}}}", "{{engine}}, rank {{rank}}")],
                8,
            ),
            Panel(
                "Age",
                "Time since a worker's process started: it falls to 0 with each restart.",
                "s",
                [
                    Query(
                        f"time() - process_start_time_seconds{{{NAMESPACE}}} and on (job, instance) lockstep_worker_ready{{{NAMESPACE}}}",
                        "{{pod}} {{instance}}",
                    )
                ],
                8,
            ),
        ],
    )
    return Dashboard("cold-start", "Cold start", "What worker groups do until they are ready, and how long.", [now, phases, memory])
