"""What clients feel, what comes in, what goes wrong."""

from helm.dashboards.queries import (
    ANSWERED,
    ANSWERS,
    FAULT,
    NEVER,
    REFUSAL,
    heatmap,
    least,
    limit,
    mean,
    quantiles,
    rate,
    stat,
    total,
    within,
)
from helm.grafana import MODEL, NAMESPACE, RED, YELLOW, Dashboard, Panel, Query, Row
from helm.values import Objectives


def overview(slo: Objectives) -> Dashboard:
    ttft, itl = "lockstep_gateway_time_to_first_token_seconds", "lockstep_gateway_inter_token_latency_seconds"
    requests = "lockstep_gateway_requests_total"
    failed, refused = f"{ANSWERED},{FAULT}", f"{ANSWERED},{REFUSAL}"
    objectives = Row(
        "Objectives",
        [
            stat(
                "First tokens in time",
                "Share of answers whose first token came within the objective.",
                "percentunit",
                within(ttft, MODEL, slo.ttftSeconds),
                steps=least(slo.ttftShare, "ttftShare"),
            ),
            stat(
                "Tokens in time",
                "Share of further tokens that came within the objective.",
                "percentunit",
                within(itl, MODEL, slo.itlSeconds),
                steps=least(slo.itlShare, "itlShare"),
            ),
            stat(
                "No fault of ours",
                "Share of requests that were not answered with 5xx.",
                "percentunit",
                f"1 - {rate(requests, failed)} / {rate(requests, ANSWERED)}",
                steps=least(slo.availability, "availability"),
            ),
            stat("Requests", "Requests that ended, a second.", "reqps", rate(requests, ANSWERED)),
            stat("Tokens", "Completion tokens, a second.", "short", rate("lockstep_gateway_tokens_total", f'{MODEL},type="completion"')),
            stat("Running", "Requests that have a slot.", "short", total("lockstep_num_requests_running", MODEL)),
            stat("Waiting", "Requests that wait for a slot.", "short", total("lockstep_num_requests_waiting", MODEL)),
            stat(
                "Alerts",
                "Alerts of Lockstep that fire; 0 also where the rules are not loaded.",
                "short",
                f'count(ALERTS{{{NAMESPACE},alertname=~"Lockstep.*",alertstate="firing"}}) or vector(0)',
                steps=NEVER,
            ),
        ],
    )
    felt = Row(
        "What clients feel",
        [
            Panel(
                "Time to first token",
                "From the arrival of an HTTP request to its first token. The red line is the objective.",
                "s",
                quantiles(ttft, MODEL),
                12,
                steps=limit(slo.ttftSeconds, "ttftSeconds"),
                line=True,
            ),
            Panel(
                "Inter-token latency",
                "Time between two tokens of an answer. The red line is the objective.",
                "s",
                quantiles(itl, MODEL),
                12,
                steps=limit(slo.itlSeconds, "itlSeconds"),
                line=True,
            ),
            heatmap("First tokens", "How the times to the first token spread.", ttft, MODEL),
            heatmap("Tokens", "How the times between tokens spread.", itl, MODEL),
            Panel(
                "Whole answers",
                "From the arrival of an HTTP request to the end of its answer.",
                "s",
                quantiles("lockstep_gateway_request_duration_seconds", f"{MODEL},{ANSWERS}"),
                12,
            ),
            Panel(
                "What the gateway adds",
                "To the first token, beyond what the scheduler measures; and to each streamed token, from its arrival to its connection.",
                "s",
                [
                    Query(f"{mean(ttft, MODEL)} - {mean('lockstep_time_to_first_token_seconds', MODEL)}", "first token, mean"),
                    *quantiles("lockstep_gateway_token_delay_seconds", MODEL, shares=(0.5, 0.99)),
                ],
                12,
            ),
        ],
    )
    load = Row(
        "Load",
        [
            Panel("Answers", "By HTTP status.", "reqps", [Query(rate(requests, ANSWERED, "code"), "{{code}}")], 8, stacked=True),
            Panel(
                "Tokens",
                "As the usage of answers counts them; cached ones are a part of the prompts'.",
                "short",
                [Query(rate("lockstep_gateway_tokens_total", MODEL, "type"), "{{type}}/s")],
                8,
            ),
            Panel(
                "Requests in work",
                "At the gateways, in slots, and waiting for one.",
                "short",
                [
                    Query(total("lockstep_gateway_inflight_requests", f"{NAMESPACE},{ANSWERS}"), "at gateways"),
                    Query(total("lockstep_num_requests_running", MODEL), "running"),
                    Query(total("lockstep_num_requests_waiting", MODEL), "waiting"),
                ],
                8,
                colors={"waiting": "orange"},
            ),
            Panel(
                "Queue time", "From the arrival of a request to its slot.", "s", quantiles("lockstep_request_queue_time_seconds", MODEL), 8
            ),
            Panel(
                "Backlog",
                "Tokens that wait to be prefilled, and the time that one group would take for them.",
                "short",
                [
                    Query(total("lockstep_num_tokens_waiting", MODEL), "tokens"),
                    Query(
                        f"{total('lockstep_num_tokens_waiting', MODEL)} / avg(lockstep_scheduler_prefill_tokens_per_second{{{MODEL}}} > 0)",
                        "seconds",
                    ),
                ],
                8,
            ),
            Panel(
                "Length of requests",
                "Tokens of prompts and completions, on average.",
                "short",
                [
                    Query(mean("lockstep_request_prompt_tokens", MODEL), "prompt"),
                    Query(mean("lockstep_request_generation_tokens", MODEL), "completion"),
                ],
                8,
            ),
        ],
    )
    errors = Row(
        "Errors",
        [
            Panel(
                "Share of faults",
                "Answers with 5xx are ours, those with 4xx the clients'.",
                "percentunit",
                [
                    Query(f"{rate(requests, failed)} / {rate(requests, ANSWERED)}", "5xx"),
                    Query(f"{rate(requests, refused)} / {rate(requests, ANSWERED)}", "4xx"),
                ],
                6,
                colors={"5xx": RED, "4xx": YELLOW},
            ),
            Panel(
                "Turned away",
                "For want of room: overloaded is 429, unavailable 503, timeout 504.",
                "reqps",
                [Query(rate("lockstep_gateway_rejections_total", NAMESPACE, "reason"), "{{reason}}")],
                6,
                stacked=True,
            ),
            Panel(
                "How requests end",
                "At the scheduler; abort: the client has left.",
                "reqps",
                [Query(rate("lockstep_request_success_total", MODEL, "finished_reason"), "{{finished_reason}}")],
                6,
                stacked=True,
                colors={"error": RED},
            ),
            Panel(
                "Interruptions",
                "Clients that left, attempts at another scheduler, and what gateways and workers that stopped left undone.",
                "reqps",
                [
                    Query(rate("lockstep_gateway_disconnects_total", NAMESPACE), "clients left"),
                    Query(rate("lockstep_gateway_resubmissions_total", NAMESPACE, "cause"), "resubmitted: {{cause}}"),
                    Query(rate("lockstep_scheduler_requests_cut_off_total", MODEL, "component"), "cut off: {{component}}"),
                ],
                6,
            ),
        ],
    )
    return Dashboard("overview", "Overview", "What clients feel, what comes in, what goes wrong.", [objectives, felt, load, errors])
