"""A drill: one clearly labelled alert through the real Alertmanager."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import datetime, timedelta, timezone
from typing import Any

from sdcwatch.errors import SdcwatchError
from sdcwatch.monitor.alerts import DRILL
from sdcwatch.monitor.config import MonitorConfig

DRILL_RUN = "drill"


def drill_alert(config: MonitorConfig, *, now: datetime, minutes: float) -> dict[str, Any]:
    """The drill as the v2 API takes it: routed like a page, and saying that it is none.

    Args:
        config: For the links.
        now: When it starts.
        minutes: After how long it ends by itself.
    """
    links = {
        "runbook_url": f"{config.runbook_url}#{DRILL.lower()}" if config.runbook_url else "",
        "dashboard_url": (
            f"{config.grafana_url.rstrip('/')}/d/{config.uid_prefix}-fleet"
            if config.grafana_url
            else ""
        ),
    }
    return {
        "labels": {
            "alertname": DRILL,
            "severity": "critical",
            "drill": "true",
            "run": DRILL_RUN,
            "suspect_rank": "0",
            "suspect_node": "no-node",
            "suspect_gpu": "no-gpu",
        },
        "annotations": {
            "summary": "DRILL: nobody's GPU is broken. This proves that a page would arrive.",
            "description": (
                "Sent by `sdcwatch monitor test-alert`. Acknowledge it and note how long it took."
            ),
            **{name: url for name, url in links.items() if url},
        },
        "startsAt": now.isoformat(),
        "endsAt": (now + timedelta(minutes=minutes)).isoformat(),
    }


def send_drill(
    alertmanager: str, config: MonitorConfig, *, minutes: float = 5.0, timeout_seconds: float = 10.0
) -> dict[str, Any]:
    """Send a drill to Alertmanager; what was sent.

    Args:
        alertmanager: Its base URL.
        config: For the links.
        minutes: After how long the drill ends by itself.
        timeout_seconds: How long to wait for an answer.

    Raises:
        SdcwatchError: It could not be reached, or refused.
    """
    alert = drill_alert(config, now=datetime.now(timezone.utc), minutes=minutes)
    if not alertmanager.startswith(("http://", "https://")):
        msg = f"Expected an http:// or https:// URL, but got {alertmanager!r}. Pass --alertmanager."
        raise SdcwatchError(msg)
    request = urllib.request.Request(
        f"{alertmanager.rstrip('/')}/api/v2/alerts",
        data=json.dumps([alert]).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds):
            return alert
    except urllib.error.HTTPError as error:
        why = f"{error.code} {error.reason}: {error.read().decode(errors='replace')[:200]}"
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        why = str(getattr(error, "reason", error))
    msg = f"Expected Alertmanager at {alertmanager} to take the drill, but got: {why}. Check it."
    raise SdcwatchError(msg)
