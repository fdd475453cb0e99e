"""Writes what follows from `helm.values`: values.yaml, values.schema.json, the chart's README and docs/values.md; and the chart's
rules and dashboards, which work as they are, with the objectives that are the defaults. templates/monitoring/_slo.tpl puts in others.
Also the values with which prometheus-adapter serves what worker groups are scaled by.

`python -m helm.generate [--into FOLDER]`; a test compares the result with what is committed.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from helm.dashboards.cold_start import cold_start
from helm.dashboards.engine import engine
from helm.dashboards.fleet import fleet
from helm.dashboards.overview import overview
from helm.rules import rules
from helm.scaling import adapter_values
from helm.values import Chart, Values

ROOT = Path(__file__).parent.parent
CHART = Path("helm/lockstep")

INTRODUCTION = """# Lockstep

Serves a large language model on a Kubernetes GPU cluster behind an OpenAI-compatible endpoint.

```
helm install lockstep helm/lockstep --set image.registry=registry.example.com/team --set image.tag=dev
kubectl port-forward service/lockstep-gateway 8000:80
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "lockstep", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
```

Images are yours: `make wheels images CUDA=1` in the repository builds them, for x86-64, and `image.registry` is where you have pushed them.
No other chart, operator or custom resource is needed. Without further values it serves a small demo model that the images
hold; `model.source` names yours. `docs/operations.md` in the repository leads through an installation step by step.

## Values

"""


class Schema(GenerateJsonSchema):
    """JSON schema whose refusals read well: what may be null says so in its type, not by alternatives."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        """Helm takes away what a user sets to null, or leaves empty as in `worker:`. What cannot be missed is then named; a map of the
        user's own is empty without it, and so is a text or a number whose default is nothing."""
        schema = field["schema"]
        if schema["type"] != "default":
            return True
        return isinstance(schema["default"], Values) or (bool(schema["default"]) and schema["schema"]["type"] not in ("nullable", "dict"))

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        kinds = inner.get("type")
        if "enum" in inner or "const" in inner or kinds is None:
            return super().nullable_schema(schema)
        return inner | {"type": [*(kinds if isinstance(kinds, list) else [kinds]), "null"]}

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        result = super().union_schema(schema)
        kinds = [choice.get("type") for choice in result.get("anyOf", [])]
        if kinds and all(choice.keys() == {"type"} for choice in result["anyOf"]):
            return {"type": kinds}
        return result


def fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield field.alias or name, field


def values_yaml(values: Values, indent: int = 0) -> Iterator[str]:
    """Lines of values.yaml: every key with its default, under a comment that explains it."""
    margin = " " * indent
    defaults = values.model_dump(by_alias=True)
    for name, field in fields(type(values)):
        yield f"{margin}# {field.description}"
        nested = getattr(values, _attribute(type(values), name))
        if isinstance(nested, Values):
            yield f"{margin}{name}:"
            yield from values_yaml(nested, indent + 2)
        else:
            dumped = yaml.safe_dump({name: defaults[name]}, sort_keys=False)
            yield from (margin + line for line in dumped.rstrip().splitlines())
        if not indent:
            yield ""


def table(values: Values, prefix: str = "") -> Iterator[str]:
    """Rows of a Markdown table, one for each value."""
    for name, field in fields(type(values)):
        nested = getattr(values, _attribute(type(values), name))
        if isinstance(nested, Values):
            yield from table(nested, f"{prefix}{name}.")
        else:
            default = json.dumps(values.model_dump(by_alias=True)[name])
            yield f"| `{prefix}{name}` | `{default}` | {field.description} |"


def generated() -> dict[Path, str]:
    """Path in the repository -> content."""
    chart = Chart()
    rows = "\n".join(["| value | default | meaning |", "|---|---|---|", *table(chart)])
    schema: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"} | Chart.model_json_schema(schema_generator=Schema)
    objectives = chart.monitoring.slo
    dashboards = (overview(objectives), engine(), fleet(), cold_start())
    head = "# Made by `make chart` from helm/values.py. Every value is explained above it; the schema refuses keys that are not here.\n\n"
    return {
        CHART / "values.yaml": head + "\n".join(values_yaml(chart)).rstrip() + "\n",
        CHART / "files/rules.yaml": yaml.safe_dump(rules(objectives), sort_keys=False, width=1000),
        CHART / "files/prometheus-adapter.yaml": yaml.safe_dump(adapter_values(), sort_keys=False, width=1000),
        **{CHART / f"files/dashboards/{each.name}.json": json.dumps(each.json(), indent=1) + "\n" for each in dashboards},
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        CHART / "README.md": INTRODUCTION + rows + "\n",
        Path("docs/values.md"): "# Values of the chart\n\nMade by `make chart` from helm/values.py.\n\n" + rows + "\n",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT, help="the root under which to write; default: this repository")
    into = parser.parse_args().into
    for path, content in generated().items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_text(content)


def _attribute(model: type[BaseModel], key: str) -> str:
    return next(name for name, field in model.model_fields.items() if key in (name, field.alias))


if __name__ == "__main__":
    main()
