"""The pages for those who run Lockstep name values, flags and series that there are."""

import re
from pathlib import Path
from typing import Any

import pytest

from helm.scaling import METRICS
from helm.values import Chart
from services.gateway.settings import GatewaySettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from shared.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
IN_CLUSTERS = ("operations", "runbooks", "gpu")
PAGES = (*IN_CLUSTERS, "recovery", "metrics", "weights", "model-configs")
PROGRAMS: dict[str, type[Settings]] = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# Of Helm, of `lockstep serve`, `plan`, `key` and `support-bundle`, and of the long run of which recovery.md tells.
OTHER_FLAGS = {"--set", "--force-conflicts", "--standby", "--gpu", "--file", "--namespace", "--break-every-s"}


def spans(page: str) -> str:
    """What stands as code within its lines, one piece a line; commands of kubectl are left out, which have flags of their own."""
    found: list[str] = SPAN.findall((ROOT / f"docs/{page}.md").read_text())
    return "\n".join(span for span in found if not span.startswith("kubectl "))


def is_value(path: str) -> bool:
    """Whether the chart has it, or takes it: a program's setting, a key of a map of the user's own."""
    here: Any = Chart().model_dump(by_alias=True)
    before = ""
    for name in path.split("."):
        if before == "settings":
            return name in PROGRAMS[path.split(".")[0]].model_fields
        if here == {}:
            return True
        if not isinstance(here, dict) or name not in here:
            return False
        here, before = here[name], name
    return True


@pytest.mark.parametrize("page", IN_CLUSTERS)
def test_values_of_the_chart_exist(page: str) -> None:
    chart = "|".join(field.alias or name for name, field in Chart.model_fields.items())
    named = re.findall(rf"^((?:{chart})(?:\.[A-Za-z]\w*)+)", spans(page), re.MULTILINE)
    assert not [path for path in named if not is_value(path)]


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    own = {f"--{name.replace('_', '-')}" for settings in PROGRAMS.values() for name in settings.model_fields}
    assert not set(re.findall(r"(?<![\w-])--[a-z][a-z-]*\w", spans(page))) - own - OTHER_FLAGS


@pytest.mark.parametrize("page", PAGES)
def test_series_exist(page: str) -> None:
    listed = set(re.findall(r"`(lockstep_\w+)`", (ROOT / "docs/metrics.md").read_text())) | {name for _, name, _ in METRICS}
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\blockstep_[a-z]\w+", spans(page))}
    assert not named - listed
