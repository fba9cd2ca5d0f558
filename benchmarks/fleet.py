"""How long the Fleet board and the rules take a Prometheus that watches 500 live runs.

    python benchmarks/fleet.py [--runs 500] [--scrapes 40]

Scrapes of synthetic runs (every series that a guard exports but histograms) are loaded into a real
Prometheus; then each query of the Fleet board, as Grafana asks it, and each rule are asked five
times. Twenty runs have a suspect. Prints the least seconds of each, because whatever else runs on
the machine only adds to them; nothing here is asserted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "monitor")]
recorded = importlib.import_module("recorded")
scrapes = importlib.import_module("scrapes")
EVERY = 15
ASKED_RANGE = 24 * 3600
STEP = 120
TIMES = 5


def lines(runs: int, count: int) -> list[str]:
    """Scrapes of `runs` runs that are alive at the end."""
    end, found = scrapes.END, []
    start = end - EVERY * count
    for number in range(runs):
        records = [scrapes.started(f"run-{number}", start), scrapes.preflight(start + 1)]
        records.append(scrapes.clean_audit(start + 30))
        if number % 25 == 0:
            records.append(scrapes.verdict(start + 60, scrapes.Outcome.SUSPECT))
        process = scrapes.Process(f"run-{number}", instance=f"host-{number}:9464")
        found += scrapes.scrapes(process, records, (start, end), EVERY)
    return scrapes.in_order(found)


def least(server: Any, expression: str, begin: float) -> float:
    """Seconds that a query takes, instant if it begins at the end; the least of some."""
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        if begin == scrapes.END:
            server.instant(expression, begin)
        else:
            server.range(expression, begin, scrapes.END, STEP)
        took.append(time.perf_counter() - began)
    return min(took)


def main() -> None:
    """Load, ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--scrapes", type=int, default=40)
    options = parser.parse_args()
    loaded = lines(options.runs, options.scrapes)
    print(f"{len(loaded) // (options.scrapes + 1)} series, {len(loaded)} samples", flush=True)
    fleet = json.loads((ROOT / "dashboards" / "sdcwatch-fleet.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((ROOT / "alerts" / "sdcwatch.rules.yml").read_text(encoding="utf-8"))
    with (
        tempfile.TemporaryDirectory() as folder,
        recorded.recorded_prometheus(Path(folder), loaded) as server,
    ):
        took: dict[str, float] = {}
        for panel in fleet["panels"]:
            for target in panel.get("targets", ()):
                expression = recorded.substitute(
                    target["expr"], run=recorded.ALL, range_seconds=ASKED_RANGE,
                    interval_seconds=STEP,
                )  # fmt: skip
                begin = scrapes.END if target.get("instant") else scrapes.END - ASKED_RANGE
                name = f"{panel['title']} {target['refId']}"
                took[name] = least(server, expression, begin)
        for rule in rules["groups"][0]["rules"]:
            took[rule["alert"]] = least(server, rule["expr"], scrapes.END)
    for name, seconds in sorted(took.items(), key=lambda item: -item[1])[:25]:
        print(f"{seconds:7.3f} s  {name}")
    ours = sum(s for n, s in took.items() if n.startswith("Sdcwatch"))
    print(f"{sum(took.values()) - ours:7.3f} s  all queries of Fleet")
    print(f"{ours:7.3f} s  all rules")


if __name__ == "__main__":
    main()
