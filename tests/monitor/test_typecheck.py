"""The dashboards against the types of Grafana 10.2, 11.6, 12.4 and 13.2: type-checked, not started.

`tools/typecheck_dashboards.sh` installs the packages and runs this file. Each panel's options and
field configuration are held against the types of its own panel plugin, and one misspelt option per
panel type must be an error: otherwise the check would see nothing.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "typecheck"
PACKAGES = HERE / "node_modules"
VERSIONS = ("10.2", "11.6", "12.4", "13.2")
"""The oldest that is promised, and the last of each line since."""
PLUGINS = {
    "stat": "Stat",
    "timeseries": "TimeSeries",
    "table": "Table",
    "state-timeline": "StateTimeline",
    "heatmap": "Heatmap",
}
MISSPELT = {
    "stat": "colourMode",
    "timeseries": "legends",
    "table": "showHeaders",
    "state-timeline": "rowsHeight",
    "heatmap": "cellGaps",
}

JSON_TYPE = """
// JSON has no enums: a string enum is one of its values, a numeric one is a number.
type Json<T> = T extends string ? `${T}` : T extends number ? number : T extends boolean ? boolean
  : T extends (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
"""


def _literal(value: Any) -> str:
    return json.dumps(value, indent=1)


PROMETHEUS_ANNOTATION = (
    "expr", "step", "tagKeys", "textFormat", "titleFormat", "useValueForTime",
)  # fmt: skip
"""Fields that Grafana's Prometheus plugin reads from an annotation; its types are not published."""


def _typed(dashboard: dict[str, Any]) -> dict[str, Any]:
    bare = copy.deepcopy(dashboard)
    for annotation in bare["annotations"]["list"]:
        for key in PROMETHEUS_ANNOTATION:
            annotation.pop(key, None)
        annotation.pop("target", None)
    return bare


def _queries(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    targets = [a["target"] for a in dashboard["annotations"]["list"] if "target" in a]
    # The plugin reads an interval of each query; it is not in the published type.
    annotations = [{k: v for k, v in target.items() if k != "interval"} for target in targets]
    return annotations + [t for p in dashboard["panels"] for t in p.get("targets", ())]


def _source(version: str, dashboards: dict[str, dict[str, Any]]) -> str:
    parts = [f"import type * as schema from 'schema-{version}';"]
    for index, (folder, name) in enumerate(PLUGINS.items()):
        path = f"schema-{version}/dist/esm/raw/composable/{folder.replace('-', '')}/panelcfg/x"
        parts.append(f"import type * as plugin{index} from '{path}/{name}PanelCfg_types.gen';")
    # Later lines publish the types of queries no more.
    query = f"schema-{VERSIONS[0]}/dist/esm/raw/composable/prometheus/dataquery/x"
    parts.append(f"import type * as query from '{query}/PrometheusDataQuery_types.gen';")
    parts.append(JSON_TYPE)
    numbers = {folder: index for index, folder in enumerate(PLUGINS)}
    for slug, dashboard in dashboards.items():
        parts.append(
            f"export const {slug}: Json<schema.Dashboard> = {_literal(_typed(dashboard))};"
        )
        queries = _literal(_queries(dashboard))
        parts.append(f"export const {slug}_q: Json<query.PrometheusDataQuery>[] = {queries};")
        for panel in dashboard["panels"]:
            if panel["type"] not in PLUGINS:
                continue
            number, name = numbers[panel["type"]], f"{slug}_{panel['id']}"
            options = _literal(panel["options"])
            parts.append(
                f"export const {name}_o: Json<Partial<plugin{number}.Options>> = {options};"
            )
            if custom := panel["fieldConfig"]["defaults"].get("custom"):
                kind = f"Partial<plugin{number}.FieldConfig>"
                parts.append(f"export const {name}_f: Json<{kind}> = {_literal(custom)};")
    return "\n".join(parts) + "\n"


def _misspelt(dashboards: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The Run dashboard with one panel of each type, each with one wrong option."""
    run = copy.deepcopy(dashboards["run"])
    first = {p["type"]: p for p in reversed(run["panels"]) if p["type"] in PLUGINS}
    for kind, panel in first.items():
        panel["options"][MISSPELT[kind]] = "x"
    return {"run": {**run, "panels": [first[kind] for kind in PLUGINS]}}


def _compile(version: str, sources: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """The errors in each source, all checked in one go."""
    for name, source in sources.items():
        (folder / f"{name}.ts").write_text(source, encoding="utf-8")
    settings = {
        "compilerOptions": {
            "strict": True,
            "noEmit": True,
            "skipLibCheck": True,
            "target": "es2022",
            "module": "esnext",
            "moduleResolution": "bundler",
            "types": [],
            "baseUrl": str(HERE),
            "paths": {
                "@grafana/schema": [f"node_modules/schema-{version}"],
                "schema-*": ["node_modules/schema-*"],
            },
        },
        "files": [f"{name}.ts" for name in sources],
    }
    (folder / "node_modules").symlink_to(PACKAGES)
    (folder / "tsconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [str(PACKAGES / ".bin" / "tsc"), "--pretty", "false"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if "error TS" in line]
    found = {name: [x for x in lines if x.startswith(f"{name}.ts")] for name in sources}
    assert sum(map(len, found.values())) == len(lines), lines
    return found


@pytest.fixture(scope="module", params=VERSIONS)
def errors(
    request: pytest.FixtureRequest,
    dashboards: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """What the compiler says of the dashboards, and of some with misspelt options."""
    version = request.param
    for needed in (PACKAGES / ".bin" / "tsc", PACKAGES / f"schema-{version}"):
        if not needed.exists():
            pytest.skip(f"no {needed.name} in node_modules: run tools/typecheck_dashboards.sh")
    sources = {
        "good": _source(version, dashboards),
        "misspelt": _source(version, _misspelt(dashboards)),
    }
    return _compile(version, sources, tmp_path_factory.mktemp("types"))


def test_every_type_of_panel_is_checked(dashboards: dict[str, dict[str, Any]]) -> None:
    assert {p["type"] for d in dashboards.values() for p in d["panels"]} == {*PLUGINS, "row"}


def test_the_dashboards_have_the_types_of_this_grafana(errors: dict[str, list[str]]) -> None:
    assert errors["good"] == []


def test_one_misspelt_option_per_panel_type_is_an_error(errors: dict[str, list[str]]) -> None:
    named = re.findall(r"'\"(\w+)\"' does not exist in type", "\n".join(errors["misspelt"]))
    assert sorted(named) == sorted(MISSPELT.values())


def test_the_docs_promise_the_oldest_grafana_that_is_checked(root: Path) -> None:
    text = " ".join((root / "docs" / "dashboards.md").read_text(encoding="utf-8").split())

    assert f"The oldest Grafana promised is {VERSIONS[0]}" in text
    assert f"`@grafana/schema` {', '.join(VERSIONS[:-1])} and {VERSIONS[-1]}" in text
