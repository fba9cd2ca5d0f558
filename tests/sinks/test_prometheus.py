"""The endpoint as a real Prometheus sees it."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from sdcwatch.core.catalog import CATALOG, RESOURCE_LABELS

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed; Debian has it in the package prometheus",
)


@pytest.fixture
def prometheus(tmp_path, free_port):
    """Starts a Prometheus that finds its targets through file_sd; returns a query function."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "200ms"},
        "scrape_configs": [
            {
                "job_name": "sdcwatch",
                "file_sd_configs": [
                    {"files": [str(tmp_path / "sd" / "*.json")], "refresh_interval": "1s"}
                ],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "sd").mkdir()
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def query(expression):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode(
            {"query": expression}
        )
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)["data"]["result"]

    def wait_for(expression, accept=bool, timeout=40):
        deadline = time.monotonic() + timeout
        while True:
            try:
                result = query(expression)
            except OSError:
                result = []
            if accept(result):
                return result
            assert time.monotonic() < deadline, (expression, result)
            time.sleep(0.1)

    yield wait_for
    server.terminate()
    server.wait(20)


def series_of(result):
    """A query's result as {(name, "label=value", ...): value}."""
    found = {}
    for entry in result:
        labels = dict(entry["metric"])
        name = labels.pop("__name__")
        for label in ("job", "instance", *RESOURCE_LABELS):
            labels.pop(label, None)
        assert not [label for label in labels if label.startswith("exported_")]
        key = (name, *(f"{k}={v}" for k, v in sorted(labels.items())))
        found[key] = float(entry["value"][1])
    return found


@pytest.mark.promtool
def test_case_2_a_run_that_was_over_before_the_first_scrape_is_seen_whole(
    prometheus, sinks, feed, faulty_run, faulty_totals, tmp_path
):
    dispatcher, _ = sinks(faulty_run[0], file_sd_dir=tmp_path / "sd")
    feed(dispatcher, faulty_run)

    result = prometheus('{job="sdcwatch",__name__=~"sdcwatch_.+"}')

    found = series_of(result)
    # Prometheus keeps no label whose value is empty.
    stored = {
        tuple(part for part in key if not part.endswith("=")): expected
        for key, expected in faulty_totals.items()
    }
    wrong = {
        key: (expected, found.get(key))
        for key, expected in stored.items()
        if found.get(key) != pytest.approx(expected)
    }
    assert wrong == {}
    names = {key[0] for key in found}
    for metric in CATALOG:
        expected = metric.prometheus + ("_bucket" if metric.kind == "histogram" else "")
        assert expected in names
    assert all(e["metric"]["run"] == "run-7" for e in result)
    assert all(e["metric"]["exporter_rank"] == "0" for e in result)
    assert [
        e["metric"]["suspect_rank"] for e in result if e["metric"]["__name__"].endswith("k_state")
    ] == ["3"]
    last = prometheus("max(sdcwatch_last_event_time_seconds)")
    assert float(last[0]["value"][1]) == faulty_run[0].time + 50
