"""The queries and panels that several dashboards share.

Dashboards ask for the services' own series and for no recorded ones, so that they work without the rules.
"""

from collections.abc import Sequence

from prometheus_client.utils import floatToGoString

from helm.grafana import GREEN, MODEL, NAMESPACE, RED, Objective, Panel, Query, Step

ENGINE = f'{MODEL},engine=~"$engine"'
DEVICE = f'{NAMESPACE},engine=~"$engine"'  # a worker's series know no model
HTTP = f'{NAMESPACE},model_name=~"$model_name|unknown"'
ANSWERS = 'endpoint=~"/v1/(chat/)?completions"'
ANSWERED = f"{HTTP},{ANSWERS}"
FAULT = 'code=~"5.."'
REFUSAL = 'code=~"4.."'
GROUP = 'engine!~"none|other"'
INTERVAL = "$__rate_interval"
PROCESSES = f"on (job, instance) lockstep_build_info{{{NAMESPACE}}}"  # process_* is everybody's


def rate(name: str, matchers: str, by: str = "") -> str:
    """What a counter gains in a second, of all or by labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{matchers}}}[{INTERVAL}]))"


def quantiles(name: str, matchers: str, by: str = "", shares: Sequence[float] = (0.5, 0.95, 0.99)) -> list[Query]:
    """Of a histogram, by labels if any are named."""
    grouped = f"{by}, le" if by else "le"
    suffix = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    return [
        Query(f"histogram_quantile({share}, {rate(f'{name}_bucket', matchers, grouped)})", f"p{share * 100:.0f}{suffix}")
        for share in shares
    ]


def mean(name: str, matchers: str, by: str = "") -> str:
    return f"{rate(f'{name}_sum', matchers, by)} / {rate(f'{name}_count', matchers, by)}"


def within(name: str, matchers: str, bound_s: float) -> str:
    """Share of a histogram's values up to a bound that it has."""
    inside = f'{matchers},le="{floatToGoString(bound_s)}"'
    return f"{rate(f'{name}_bucket', inside)} / {rate(f'{name}_count', matchers)}"


def total(name: str, matchers: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({name}{{{matchers}}})"


def limit(value: float, objective: Objective) -> tuple[Step, ...]:
    """Red from an objective on."""
    return Step(None, GREEN), Step(value, RED, objective)


def least(value: float, objective: Objective) -> tuple[Step, ...]:
    """Red below an objective."""
    return Step(None, RED), Step(value, GREEN, objective)


def states(ok_from: float = 1) -> tuple[Step, ...]:
    return Step(None, RED), Step(ok_from, GREEN)


NEVER = (Step(None, GREEN), Step(0.001, RED))  # more than none is bad
NEUTRAL = (Step(None, "blue"),)


def stat(title: str, description: str, unit: str, expr: str, width: int = 3, steps: Sequence[Step] = NEUTRAL) -> Panel:
    return Panel(title, description, unit, [Query(expr)], width, "stat", steps, height=4)


def heatmap(title: str, description: str, name: str, matchers: str) -> Panel:
    expr = f"sum by (le) (increase({name}_bucket{{{matchers}}}[{INTERVAL}]))"
    return Panel(title, description, "short", [Query(expr, "{{le}}")], 12, "heatmap")
