"""Groups, schedulers and gateways: who serves, where requests go, who moves."""

from helm.dashboards.queries import DEVICE, ENGINE, GROUP, INTERVAL, NEUTRAL, PROCESSES, quantiles, rate, stat, states, total
from helm.grafana import GREEN, MODEL, NAMESPACE, RED, Dashboard, Panel, Query, Row, Step


def fleet() -> Dashboard:
    ready = f"lockstep_scheduler_group_ready{{{ENGINE},{GROUP}}}"
    who = Row(
        "Who serves",
        [
            stat("Groups", "Worker groups that take requests.", "short", f"sum({ready})", 6, states()),
            stat(
                "Leaders",
                "Schedulers that lead, of the release that has most: it should be one.",
                "short",
                f"max({total('lockstep_scheduler_leads', MODEL, 'namespace, model_name')})",
                6,
                (*states(), Step(2, RED)),
            ),
            stat("Schedulers", "That are scraped, with those that stand by.", "short", f"count(lockstep_scheduler_leads{{{MODEL}}})", 6),
            stat("Gateways", "With a session with the leader.", "short", total("lockstep_gateway_backend_up", NAMESPACE), 6, states()),
            Panel(
                "Groups that take requests",
                "As the leader sees them.",
                "none",
                [Query(f"max by (engine) ({ready})", "{{engine}}")],
                12,
                "state-timeline",
                NEUTRAL,
            ),
            Panel(
                "Who leads",
                "Of the schedulers.",
                "none",
                [Query(f"max by (pod, instance) (lockstep_scheduler_leads{{{MODEL}}})", "{{pod}} {{instance}}")],
                12,
                "state-timeline",
                NEUTRAL,
            ),
        ],
    )
    running = f"lockstep_num_requests_running{{{ENGINE},{GROUP}}}"
    routing = Row(
        "Routing",
        [
            Panel(
                "Requests by group",
                "That ended, a second.",
                "reqps",
                [Query(rate("lockstep_request_success_total", f"{ENGINE},{GROUP}", "engine"), "{{engine}}")],
                8,
                stacked=True,
            ),
            Panel(
                "Running by group",
                "Requests that have a slot.",
                "short",
                [Query(f"max by (engine) ({running})", "{{engine}}")],
                8,
                stacked=True,
            ),
            Panel(
                "Spread of the load",
                "Standard deviation and mean of running requests over the groups: routing by cached prefixes makes some busier.",
                "short",
                [Query(f"stddev(max by (engine) ({running}))", "deviation"), Query(f"avg(max by (engine) ({running}))", "mean")],
                8,
            ),
            Panel(
                "Hits by group",
                "Share of prompt tokens that were in the group's prefix cache: where they are is where a request goes.",
                "percentunit",
                [
                    Query(
                        f"{rate('lockstep_prefix_cache_hits_total', f'{ENGINE},{GROUP}', 'engine')}"
                        f" / ({rate('lockstep_prefix_cache_queries_total', f'{ENGINE},{GROUP}', 'engine')} > 0)",
                        "{{engine}}",
                    )
                ],
                8,
                most=1,
            ),
            Panel(
                "Waiting by group",
                "none: no group takes requests.",
                "short",
                [Query(f"max by (engine) (lockstep_num_requests_waiting{{{MODEL}}})", "{{engine}}")],
                8,
                stacked=True,
            ),
            Panel(
                "Rejected by the scheduler",
                "By reason.",
                "reqps",
                [Query(rate("lockstep_scheduler_requests_rejected_total", MODEL, "reason"), "{{reason}}")],
                8,
                stacked=True,
            ),
        ],
    )
    moves = Row(
        "Moves",
        [
            Panel(
                "Requests that moved",
                "lost: their group died; drained: it stops in good order; failed: it computed nothing for them.",
                "reqps",
                [Query(rate("lockstep_scheduler_requests_moved_total", MODEL, "cause"), "{{cause}}")],
                8,
                stacked=True,
                colors={"lost": RED, "drained": GREEN},
            ),
            Panel(
                "Requests submitted again",
                "At another scheduler. lost: its session broke; moved: it stopped in good order; broken: tokens came that cannot be.",
                "reqps",
                [Query(rate("lockstep_gateway_resubmissions_total", NAMESPACE, "cause"), "{{cause}}")],
                8,
                stacked=True,
            ),
            Panel(
                "Groups taken over",
                "Execute streams since the worker's start: one more with each leader and each broken connection.",
                "short",
                [Query(f"max by (engine) (lockstep_worker_streams_total{{{DEVICE}}})", "{{engine}}")],
                8,
            ),
        ],
    )
    processes = Row(
        "Processes",
        [
            Panel(
                "CPU",
                "Cores in use.",
                "short",
                [Query(f"rate(process_cpu_seconds_total{{{NAMESPACE}}}[{INTERVAL}]) and {PROCESSES}", "{{pod}} {{instance}}")],
                8,
            ),
            Panel(
                "Memory",
                "Resident; a worker's ranks have their own.",
                "bytes",
                [Query(f"process_resident_memory_bytes{{{NAMESPACE}}} and {PROCESSES}", "{{pod}} {{instance}}")],
                8,
            ),
            Panel(
                "Lateness of event loops",
                "What everything in a service has to wait, p99.",
                "s",
                quantiles("lockstep_event_loop_lag_seconds", NAMESPACE, "pod, instance", (0.99,)),
                8,
                steps=(Step(None, GREEN), Step(0.5, RED)),
                line=True,
            ),
        ],
    )
    return Dashboard(
        "fleet", "Fleet", "Groups, schedulers and gateways: who serves, where requests go, who moves.", [who, routing, moves, processes]
    )
