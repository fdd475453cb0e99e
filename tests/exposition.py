"""What /metrics answers, read by the official parsers."""

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def samples(answer: httpx.Response) -> dict[str, float]:
    """Values by `name{label=value,...}`, labels in alphabetical order. Fails where a parser would, or a family stands twice."""
    fancy = answer.raise_for_status().headers["content-type"].startswith("application/openmetrics-text")
    families = list((openmetrics if fancy else text)(answer.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "HELP and TYPE stand once for each name"
    return {
        f"{sample.name}{{{','.join(f'{label}={value}' for label, value in sorted(sample.labels.items()))}}}": sample.value
        for family in families
        for sample in family.samples
    }
