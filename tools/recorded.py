"""The recorded runs in a real Prometheus, for tests and for the pictures of the dashboards."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch.testing import free_port

RECORDINGS = Path(__file__).parents[1] / "tests" / "monitor" / "recordings"
START_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded run.

    Attributes:
        run: Its `run` label.
        start: Unix time of its first scrape.
        end: Unix time of its last one.
    """

    run: str
    start: float
    end: float


def recordings() -> dict[str, Recording]:
    """The recorded runs by name of their file."""
    found = {}
    for path in sorted(RECORDINGS.glob("*.om.gz")):
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()[:-1]
        run = re.search(r'\brun="([^"]*)"', lines[0])
        assert run is not None
        times = [float(line.rpartition(" ")[2]) for line in (lines[0], lines[-1])]
        found[path.name.removesuffix(".om.gz")] = Recording(run[1], times[0], times[1])
    return found


class Recorded:
    """A Prometheus that holds the recordings.

    Attributes:
        url: Where it is.
        runs: What it holds.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs = recordings()

    def _get(self, path: str, **query: object) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        text = urllib.parse.urlencode({k: str(v) for k, v in query.items()}).encode()
        try:
            with opener.open(urllib.request.Request(f"{self.url}{path}", text), timeout=30) as got:
                answer = json.loads(got.read())
        except urllib.error.HTTPError as error:
            msg = f"{query}: {error.read().decode(errors='replace')}"
            raise ValueError(msg) from error
        return answer["data"]["result"]

    def instant(self, expression: str, at: float) -> list[dict[str, Any]]:
        """The result of an instant query."""
        return list(self._get("/api/v1/query", query=expression, time=at))

    def range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The result of a range query."""
        return list(
            self._get("/api/v1/query_range", query=expression, start=start, end=end, step=step)
        )


ALL = ".+"
"""What Grafana puts in for All: our variables set it, and Grafana does not escape it."""


def escaped(value: str) -> str:
    """A value as Grafana's format ``regex`` writes it."""
    return value if value == ALL else re.sub(r"[\\^$*+?.()|[\]{}/]", r"\\\g<0>", value)


def substitute(
    expression: str,
    *,
    run: str,
    range_seconds: float,
    interval_seconds: int = 15,
    gpu: str = ALL,
) -> str:
    """An expression of a dashboard with Grafana's variables filled in, by Grafana's own rules.

    Args:
        expression: Of a panel.
        run: Any name, or `ALL`.
        range_seconds: Length of the dashboard's range.
        interval_seconds: Step of the panel.
        gpu: Any name, or `ALL`.
    """
    values = {
        "${run:regex}": escaped(run),
        "${job:regex}": ALL,
        "${gpu:regex}": escaped(gpu),
        "$__range_s": str(round(range_seconds)),
        "$__range": f"{round(range_seconds)}s",
        "$__rate_interval": f"{max(60, 4 * interval_seconds)}s",
        "$__interval_ms": str(1000 * interval_seconds),
        "$__interval": f"{interval_seconds}s",
    }
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def _blocks(folder: Path) -> None:
    for path in sorted(RECORDINGS.glob("*.om.gz")):
        plain = folder / path.name.removesuffix(".gz")
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        _create(plain, folder)
    devices = (RECORDINGS / "dcgm.prom").read_text(encoding="utf-8").splitlines()
    last = max(r.end for r in recordings().values())
    samples = [f"{line} {last:.0f}" for line in devices if not line.startswith("#")]
    plain = folder / "dcgm.om"
    plain.write_text("\n".join([*samples, "# EOF", ""]), encoding="utf-8")
    _create(plain, folder)


def _create(plain: Path, folder: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is not on the PATH"
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics"]
    # It reads the whole file once per block: few blocks.
    command += ["--max-block-duration=720h", str(plain), str(folder)]
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def recorded_prometheus(folder: Path, more: Sequence[str] = ()) -> Iterator[Recorded]:
    """Start a Prometheus with the recordings on a free port, until the block ends.

    Args:
        folder: For its data.
        more: Samples to load besides, in the OpenMetrics format.
    """
    prometheus = shutil.which("prometheus")
    assert prometheus is not None, "prometheus is not on the PATH"
    data = folder / "data"
    data.mkdir()
    _blocks(data)
    if more:
        plain = folder / "more.om"
        plain.write_text("\n".join([*more, "# EOF", ""]), encoding="utf-8")
        _create(plain, data)
    (folder / "prometheus.yml").write_text("global: {scrape_interval: 1m}\n", encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        prometheus,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        server = Recorded(f"http://{address}")
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, ValueError):
                server.instant("vector(1)", time.time())
                break
            text = (folder / "prometheus.log").read_text(errors="replace")
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)
