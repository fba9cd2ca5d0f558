"""Suspects of finished and living runs: what a launcher may leave out, and closing one."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdcwatch.core.records import Closing
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.suspects import SuspectDevice, suspect_devices
from sdcwatch.core.text import count
from sdcwatch.errors import ConfigurationError
from sdcwatch.report.read import require_run
from sdcwatch.sinks.jsonl import RunSoFar, append_closing, write_summary


def summary_of(run_dir: Path) -> RunSummary:
    """A run as its directory tells it, with what persons have closed.

    Raises:
        ConfigurationError: The directory holds no run, or one that cannot be read.
    """
    require_run(run_dir)
    so_far = RunSoFar(run_dir)
    if so_far.problem:
        msg = f"Expected records of sdcwatch in {run_dir}, but {so_far.problem}."
        raise ConfigurationError(msg)
    return so_far.summary


def suspects_of(run_dirs: Iterable[Path]) -> list[dict[str, Any]]:
    """The suspect devices of some runs as plain JSON values, one entry per run and device."""
    entries = []
    for run_dir in run_dirs:
        summary = summary_of(run_dir)
        run = {"run": summary.run, "run_id": summary.run_id, "run_dir": str(run_dir)}
        entries += [{**run, **device.to_dict()} for device in suspect_devices(summary)]
    return entries


def close_suspect(
    run_dir: Path, *, gpu: str, instance_id: str, reason: str, by: str | None
) -> RunSummary:
    """Write down that a person has dealt with a device; a run that lives sees it within seconds.

    Args:
        run_dir: Directory of the run.
        gpu: The GPU as verdicts name it.
        instance_id: Its instance id; "" if only one instance has a suspect GPU of that name.
        reason: What was done or found out.
        by: Who says so; the user of this process if None.

    Returns:
        The run after that.

    Raises:
        ConfigurationError: There is no such run, no such suspect, or it is closed already.
        OSError: It cannot be written.
    """
    summary = summary_of(run_dir)
    devices = suspect_devices(summary)
    matching = [
        d for d in devices if d.newest.gpu == gpu and instance_id in ("", d.newest.instance_id)
    ]
    struck = [s for s in summary.strikes if s.gpu == gpu and instance_id in ("", s.instance_id)]
    instances = {*(d.newest.instance_id for d in matching), *(s.instance_id for s in struck)}
    _require_one(gpu, instances, devices, summary)
    if not struck and all(d.closing is not None for d in matching):
        msg = f"Expected an open suspect, but {gpu} was closed before. See: sdcwatch suspects."
        raise ConfigurationError(msg)
    closing = Closing(
        instance_id=instances.pop(),
        gpu=gpu,
        reason=reason,
        by=by or getpass.getuser(),
        time=max(time.time(), summary.last_time),  # all that was known: clocks may differ
    )
    append_closing(run_dir, closing)
    after = summary_of(run_dir)
    write_summary(run_dir, after)
    return after


def _require_one(
    gpu: str, instances: set[str], devices: Sequence[SuspectDevice], summary: RunSummary
) -> None:
    if len(instances) == 1:
        return
    if instances:
        names = ", ".join(sorted(instances))
        msg = f"Expected one instance with {gpu}, but got {names}. Pass --instance-id too."
        raise ConfigurationError(msg)
    known = ", ".join(
        dict.fromkeys([d.newest.gpu for d in devices] + [s.gpu for s in summary.strikes])
    )
    msg = f"Expected a suspect GPU of this run, but got {gpu!r}. It has: {known or 'none'}."
    raise ConfigurationError(msg)


def lines_of(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Suspect devices for a person, a line or two each."""
    if not entries:
        return ["No device has been named."]
    lines = []
    for entry in entries:
        where = f"{entry['gpu']} on {entry['node']} (instance {entry['instance_id']})"
        lines.append(f"{entry['state']}: {where}, rank {entry['rank']} in run {entry['run']}")
        lines.append(
            f"    {entry['evidence']}; steps {entry['first_step']} to {entry['last_step']}, "
            f"since {entry['since']}"
        )
        if (closing := entry["closing"]) is not None:
            lines.append(f"    closed by {closing['by'] or 'somebody'}: {closing['reason']}")
    still_open = sum(entry["state"] == "open" for entry in entries)
    return [*lines, f"{count(still_open, 'open suspect')}."]
