"""Everything about a demo that is settled before a rank starts: its directory, plan and port."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path

from sdcwatch.demo.closing import PLAN_NAME
from sdcwatch.demo.planted import check_ranks, fit_to
from sdcwatch.demo.settings import DEFAULT_PLAN, DemoSettings
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.plan import FaultPlan
from sdcwatch.faults.yaml_form import dump_plan, load_plan

RUNS_DIR = Path("sdcwatch-runs")


def new_run(prefix: str) -> str:
    """A name that no other run has."""
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def choose_plan(faults: str, world_size: int) -> FaultPlan:
    """The plan that ``--faults`` names.

    Args:
        faults: "default", "none", or the path of a YAML file.
        world_size: Number of ranks, which every rank of the plan must fit.

    Raises:
        ConfigurationError: The file cannot be read, or names a rank that the run does not have.
    """
    if faults == "none":
        return FaultPlan()
    if faults == "default":
        return fit_to(load_plan(DEFAULT_PLAN), world_size)
    plan = load_plan(faults)
    check_ranks(plan, world_size)
    return plan


def prepare(settings: DemoSettings, plan: FaultPlan) -> DemoSettings:
    """Make the run directory, keep the plan in it, and settle the port.

    Raises:
        ConfigurationError: The directory cannot be made, or already holds something.
    """
    run_dir = settings.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        occupied = any(run_dir.iterdir())
    except OSError as error:
        msg = f"Expected to create {run_dir}, but got: {error.strerror}. Pass another --run-dir."
        raise ConfigurationError(msg) from error
    if occupied:
        msg = f"Expected a new or empty --run-dir, but {run_dir} holds files. Pass another."
        raise ConfigurationError(msg)
    path = None
    if plan.faults:
        path = run_dir / PLAN_NAME
        path.write_text(dump_plan(plan), encoding="utf-8")
    port = settings.metrics_port or _free_port(settings.metrics_host)
    return replace(settings, plan=path, metrics_port=port)


def _free_port(host: str) -> int:
    """A port that is free now; both segments of a run use the same one."""
    try:
        with socket.create_server((host, 0)) as server:
            port: int = server.getsockname()[1]
            return port
    except OSError as error:
        msg = (
            f"Expected --metrics-host to be an address of this machine, but got {host!r}: {error}."
        )
        raise ConfigurationError(msg) from error
