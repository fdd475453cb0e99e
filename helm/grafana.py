"""What a Grafana dashboard is made of, as far as ours need it: queries, panels laid out in rows, variables; and its JSON.

As the schema of Grafana 12 wants it, and every version since 8.3 understands it: data sources are named by type and uid, a name alone
is passed over; every panel has an id and a place, and none needs a plugin.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WIDTH = 24  # columns of Grafana's grid
HEIGHT = 8  # rows of a panel
GREEN, YELLOW, RED = "green", "yellow", "red"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Objective = Literal["ttftSeconds", "itlSeconds", "ttftShare", "itlShare", "availability"]

NAMESPACE = 'namespace=~"$namespace"'
MODEL = f'{NAMESPACE},model_name=~"$model_name"'


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Step:
    """From `value` on it has this colour. `objective` says which of the release's stands there."""

    value: float | None
    color: str
    objective: Objective | None = None

    def json(self) -> dict[str, Any]:
        return {"color": self.color, "value": self.value} | ({"objective": self.objective} if self.objective else {})


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    width: int
    kind: Literal["timeseries", "stat", "heatmap", "bargauge", "state-timeline"] = "timeseries"
    steps: Sequence[Step] = (Step(None, GREEN),)
    line: bool = False  # a time series shows its steps as lines
    stacked: bool = False
    most: float | None = None
    decimals: int | None = None
    height: int = HEIGHT
    colors: dict[str, str] = field(default_factory=dict)  # by legend, of series that mean good or bad

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        heat = self.kind == "heatmap"
        targets = [
            {
                "refId": "ABCDEFGH"[index],
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": self.kind in ("timeseries", "heatmap", "state-timeline"),
                "instant": self.kind in ("stat", "bargauge"),
                "format": "heatmap" if heat else "time_series",
            }
            for index, query in enumerate(self.queries)
        ]
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "min": 0,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
            "thresholds": {"mode": "absolute", "steps": [step.json() for step in self.steps]},
        }
        if self.most is not None:
            defaults["max"] = self.most
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        if self.kind == "timeseries":
            defaults["custom"] = {
                "drawStyle": "line",
                "lineInterpolation": "linear",
                "lineWidth": 1,
                "fillOpacity": 25 if self.stacked else 8,
                "gradientMode": "none",
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "line" if self.line else "off"},
                "axisSoftMin": 0,
            }
        if self.kind == "state-timeline":
            defaults["custom"] = {"fillOpacity": 70, "lineWidth": 0}
            defaults["mappings"] = [
                {
                    "type": "value",
                    "options": {"0": {"text": "no", "color": RED, "index": 0}, "1": {"text": "yes", "color": GREEN, "index": 1}},
                }
            ]
        overrides = [
            {
                "matcher": {"id": "byName", "options": name},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
            }
            for name, color in self.colors.items()
        ]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": overrides},
            "options": OPTIONS[self.kind],
        }


OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max", "lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64, "exponent": 0.5},
        "yAxis": {"unit": "s", "axisPlacement": "left"},
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "legend": {"show": True},
        "filterValues": {"le": 1e-9},
    },
    "bargauge": {
        "displayMode": "gradient",
        "orientation": "horizontal",
        "showUnfilled": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "state-timeline": {
        "mergeValues": True,
        "showValue": "never",
        "rowHeight": 0.8,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single"},
    },
}


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    name: str  # of its file
    title: str
    description: str
    rows: Sequence[Row]

    def json(self) -> dict[str, Any]:
        return {
            "uid": f"lockstep-{self.name}",
            "title": f"Lockstep / {self.title}",
            "description": self.description,
            "tags": ["lockstep"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,  # one crosshair for all panels
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "type": "dashboards",
                    "title": "Lockstep",
                    "tags": ["lockstep"],
                    "icon": "dashboard",
                    "tooltip": "The other dashboards of Lockstep",
                    "asDropdown": False,
                    "targetBlank": False,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "annotations": {"list": []},
            "templating": {"list": variables()},
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[dict[str, Any]]:
        """Panels from left to right, in lines of WIDTH columns, each row under its heading."""
        number, y = 1, 0
        for row in self.rows:
            yield {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
            }
            number, x, y, height = number + 1, 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, height = 0, y + height, 0
                yield panel.json(number, x, y)
                number, x, height = number + 1, x + panel.width, max(height, panel.height)
            y += height


def variables() -> list[dict[str, Any]]:
    running = "lockstep_num_requests_running"
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "refresh": 1,
        "includeAll": False,
        "multi": False,
    }
    asked = (
        ("namespace", "Namespace", f"label_values({running}, namespace)"),
        ("model_name", "Model", f"label_values({running}{{{NAMESPACE}}}, model_name)"),
        ("engine", "Worker group", f'label_values({running}{{{MODEL},engine!~"none|other"}}, engine)'),
    )
    return [
        source,
        *(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": DATASOURCE,
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,  # whenever the time range changes: groups come and go
                "sort": 1,
                "includeAll": True,
                "allValue": ".*",  # also what has no such label
                "multi": True,
                "hide": 0,
                "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            }
            for name, label, query in asked
        ),
    ]
