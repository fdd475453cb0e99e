"""Memory, batches, lead and steps of worker groups."""

from helm.dashboards.queries import DEVICE, ENGINE, GROUP, mean, quantiles, rate, total
from helm.grafana import GREEN, RED, Dashboard, Panel, Query, Row, Step


def engine() -> Dashboard:
    memory = Row(
        "Memory",
        [
            Panel(
                "KV cache in use",
                "By running requests; what could be evicted is not in use. Near 1, requests are preempted.",
                "percentunit",
                [Query(f"max by (engine) (lockstep_kv_cache_usage_perc{{{ENGINE},{GROUP}}})", "{{engine}}")],
                8,
                steps=(Step(None, GREEN), Step(0.95, RED)),
                line=True,
                most=1,
            ),
            Panel(
                "Pages",
                "By state: cached ones are free for whoever needs them.",
                "short",
                [Query(total("lockstep_scheduler_pages", ENGINE, "state"), "{{state}}")],
                8,
                stacked=True,
            ),
            Panel(
                "Prefix cache hits",
                "Share of prompt tokens that were in the cache.",
                "percentunit",
                [
                    Query(
                        f"{rate('lockstep_prefix_cache_hits_total', ENGINE, 'engine')}"
                        f" / ({rate('lockstep_prefix_cache_queries_total', ENGINE, 'engine')} > 0)",
                        "{{engine}}",
                    )
                ],
                8,
                most=1,
            ),
            Panel(
                "Tokens by what became of them",
                "Computed in prefill, taken from the prefix cache instead, decoded.",
                "short",
                [Query(rate("lockstep_realtime_tokens_total", ENGINE, "mode"), "{{mode}}/s")],
                12,
                stacked=True,
            ),
            Panel(
                "Preemptions",
                "Requests that lost their slot for want of pages, a second.",
                "reqps",
                [Query(rate("lockstep_num_preemptions_total", f"{ENGINE},{GROUP}", "engine"), "{{engine}}")],
                12,
                steps=(Step(None, GREEN), Step(0.5, RED)),
                line=True,
            ),
        ],
    )
    batch = Row(
        "Batch and lead",
        [
            Panel(
                "Running",
                "Requests that have a slot.",
                "short",
                [Query(f"max by (engine) (lockstep_num_requests_running{{{ENGINE},{GROUP}}})", "{{engine}}")],
                8,
            ),
            Panel(
                "Waiting",
                "Requests that wait for a slot.",
                "short",
                [Query(total("lockstep_num_requests_waiting", ENGINE, "engine"), "{{engine}}")],
                8,
            ),
            Panel("Tokens of a step", "Decodes and prefill together.", "short", quantiles("lockstep_iteration_tokens_total", ENGINE), 8),
            Panel(
                "Lead",
                "Time of the work that is queued at a group, and what should be: it hides the way between scheduler and group.",
                "s",
                [
                    Query(f"max by (engine) (lockstep_scheduler_lead_seconds{{{ENGINE},{GROUP}}})", "{{engine}}"),
                    Query(f"max by (engine) (lockstep_scheduler_lead_target_seconds{{{ENGINE},{GROUP}}})", "{{engine}}, wanted"),
                ],
                8,
            ),
            Panel(
                "Plans under way",
                "Sent, their results not yet in.",
                "short",
                [Query(f"max by (engine) (lockstep_scheduler_outstanding_plans{{{ENGINE},{GROUP}}})", "{{engine}}")],
                8,
            ),
            Panel(
                "Iterations of a plan",
                "On average; more than one while steps are short.",
                "short",
                [Query(mean("lockstep_scheduler_plan_iterations", f"{ENGINE},{GROUP}", "engine"), "{{engine}}")],
                8,
                decimals=2,
            ),
        ],
    )
    kinds = "lockstep_worker_step_seconds"
    steps = Row(
        "Steps",
        [
            Panel(
                "Step time",
                "As the worker measures it, by whether prompts were computed in it.",
                "s",
                quantiles(kinds, DEVICE, "kind", (0.5, 0.99)),
                8,
            ),
            Panel(
                "Busy",
                "Share of the time in which the group computes.",
                "percentunit",
                [Query(rate("lockstep_worker_busy_seconds_total", DEVICE, "engine"), "{{engine}}")],
                8,
                most=1,
            ),
            Panel(
                "Steps as CUDA graphs",
                "Share of iterations that were replayed; 0 on CPUs and in simulations.",
                "percentunit",
                [
                    Query(
                        f"{rate('lockstep_worker_graph_iterations_total', DEVICE, 'engine')}"
                        f" / ({rate(f'{kinds}_count', DEVICE, 'engine')} > 0)",
                        "{{engine}}",
                    )
                ],
                8,
                most=1,
            ),
            Panel(
                "Planning",
                "Time of the scheduler's thread for a result and the plans that follow.",
                "s",
                quantiles("lockstep_scheduler_planning_seconds", ENGINE),
                8,
            ),
            Panel(
                "What a group can take",
                "Prompt tokens a second, of the time in which it computes prompts.",
                "short",
                [Query(f"max by (engine) (lockstep_scheduler_prefill_tokens_per_second{{{ENGINE},{GROUP}}})", "{{engine}}")],
                8,
            ),
            Panel(
                "Rows gathered whole",
                "Rows a second whose logits all ranks had to exchange.",
                "short",
                [Query(rate("lockstep_worker_rows_gathered_total", DEVICE, "engine"), "{{engine}}")],
                8,
            ),
        ],
    )
    requests = Row(
        "Stages of a request",
        [
            Panel("Prefill", "From the slot to the first token.", "s", quantiles("lockstep_request_prefill_time_seconds", ENGINE), 8),
            Panel("Decode", "From the first token to the end.", "s", quantiles("lockstep_request_decode_time_seconds", ENGINE), 8),
            Panel(
                "Time per output token",
                "Mean of a request, after its first token.",
                "s",
                quantiles("lockstep_request_time_per_output_token_seconds", ENGINE),
                8,
            ),
        ],
    )
    return Dashboard("engine", "Engine", "Memory, batches, lead and steps of worker groups.", [memory, batch, steps, requests])
