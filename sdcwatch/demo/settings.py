"""What a demo run is told: one frozen value that travels from the command line to every rank.

Everything is settled before a rank starts: the directory, the port, the plan of faults, and what a
grade needs to know of it.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from sdcwatch.core.grade import Planted
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.plan import Expectation, Fault, FaultPlan, dump_plan, load_plan

WandbMode = Literal["offline", "online", "off"]

UNGUARDED_LOG = "unguarded.jsonl"
DEFAULT_PLAN = Path(__file__).with_name("default_plan.yaml")

AUDIT_EVERY = 20
FINGERPRINT_EVERY = 5
CHECKPOINT_EVERY = 40
DEFAULT_STEPS = 180
SCRAPE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One demo run.

    Attributes:
        run: Its name.
        run_dir: Folder of this run alone: events, checkpoints, logs, W&B files, report.
        nodes: Simulated nodes; the ranks of all of them run on this machine.
        ranks_per_node: Ranks on each.
        steps: Training steps.
        seed: Seed of weights, data, dropout and pairing.
        plan: Fault plan as a YAML file; None plants nothing.
        unguarded: Train without the guard.
        serve: Keep /metrics up after the run until interrupted.
        metrics_host: Address /metrics binds to.
        metrics_port: Its port; a free one has been chosen where the user gave 0.
        linger_seconds: How long /metrics stays up at the end of each segment; None means not at
            all, or under `serve` as long as a scrape may take.
        wandb: "offline" writes below `run_dir`, "online" syncs, "off" does without.
        batch: Sequences in each micro-batch.
        peak_learning_rate: Learning rate after warm-up.
        warmup_steps: Steps of linear warm-up.
    """

    run: str
    run_dir: Path
    nodes: int = 3
    ranks_per_node: int = 2
    steps: int = DEFAULT_STEPS
    seed: int = 0
    plan: Path | None = DEFAULT_PLAN
    unguarded: bool = False
    serve: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    linger_seconds: float | None = None
    wandb: WandbMode = "offline"
    batch: int = 2
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        """Check what no option parser can."""
        for name in ("nodes", "ranks_per_node", "steps"):
            if getattr(self, name) < 1:
                msg = f"Expected {name} >= 1, but got {getattr(self, name)}. Pass a larger number."
                raise ConfigurationError(msg)

    @property
    def linger(self) -> float:
        """Seconds that /metrics stays up at the end of a segment that is followed by another."""
        if self.linger_seconds is not None:
            return self.linger_seconds
        return SCRAPE_SECONDS if self.serve else 0.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go."""
        return self.run_dir / "checkpoints"

    @property
    def file_sd_dir(self) -> Path:
        """Where the /metrics endpoint announces itself to Prometheus."""
        return self.run_dir / "file_sd"

    def checkpoint(self, step: int) -> Path:
        """The file of the checkpoint of `step`."""
        return self.checkpoint_dir / f"step-{step:06d}.pt"

    def save(self) -> Path:
        """Write the settings into the run directory, for the launcher and for later readers."""
        path = self.run_dir / "demo.json"
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
        path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> DemoSettings:
        """The settings that `save` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        for name in ("run_dir", "plan"):
            values[name] = Path(values[name]) if values[name] is not None else None
        return cls(**values)


PLAN_NAME = "plan.yaml"
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


EVER = 2**31
_DIVERGING_SITES = ("weight", "optimizer_state", "all_reduce")
_FEWEST_RANKS = 3
"""With fewer, nobody can settle whether producer or replayer is wrong."""


def planted_of(plan: FaultPlan, world_size: int) -> tuple[Planted, ...]:
    """What a grade needs to know of each fault."""
    return tuple(_planted(fault, world_size) for fault in plan.faults)


def _planted(fault: Fault, world_size: int) -> Planted:
    first, last = span_of(fault)
    ranks = tuple(range(world_size)) if fault.ranks == "all" else fault.ranks
    common = Planted(
        name=fault.label,
        where=" ".join(
            filter(None, (fault.kind.replace("_", " "), "in", fault.site, fault.target))
        ),
        ranks=ranks,
        first_step=first,
        last_step=last,
        expected="nothing stated",
    )
    if isinstance(fault.expect, Expectation):
        wanted = fault.expect
        return replace(
            common,
            expected="verdict",
            check=wanted.check,
            outcome=wanted.outcome,
            named=wanted.ranks,
            step=wanted.step,
        )
    return replace(common, expected="miss") if fault.expect == "miss" else common


def span_of(fault: Fault) -> tuple[int, int]:
    """First and last step at which a fault may act."""
    if fault.step is not None:
        return fault.step, fault.step
    return fault.steps if fault.steps is not None else (1, EVER)


def fit_to(plan: FaultPlan, world_size: int) -> FaultPlan:
    """The plan with every rank taken modulo the world size: for the plan that ships with the demo.

    Raises:
        ConfigurationError: Too few ranks to settle an audit.
    """
    if world_size < _FEWEST_RANKS:
        msg = (
            f"Expected at least {_FEWEST_RANKS} ranks for the default faults, but got "
            f"{world_size}. Pass more --nodes, a fault plan of your own, or --faults none."
        )
        raise ConfigurationError(msg)
    return replace(plan, faults=tuple(_fit(fault, world_size) for fault in plan.faults))


def _fit(fault: Fault, world_size: int) -> Fault:
    wanted = fault.expect
    if isinstance(wanted, Expectation):
        wanted = replace(wanted, ranks=tuple(r % world_size for r in wanted.ranks))
    ranks = fault.ranks if fault.ranks == "all" else tuple(r % world_size for r in fault.ranks)
    return replace(fault, ranks=ranks, expect=wanted)


def check_ranks(plan: FaultPlan, world_size: int) -> None:
    """Check that every rank of the plan exists.

    Raises:
        ConfigurationError: One does not.
    """
    for fault in plan.faults:
        absent = [r for r in fault.ranks if r != "all" and int(r) >= world_size]
        if absent:
            msg = (
                f"Expected ranks below {world_size}, but got rank {absent[0]} in fault "
                f"{fault.label!r}. Correct the plan, or pass more --nodes."
            )
            raise ConfigurationError(msg)


def after(plan: FaultPlan, step: int) -> FaultPlan:
    """What is left of a plan once the machine that failed at `step` has been replaced."""
    return replace(plan, faults=tuple(f for f in plan.faults if span_of(f)[0] > step))


def may_stop(plan: FaultPlan) -> bool:
    """Whether the plan holds a fault that makes replicas differ, which ends a segment."""
    return any(fault.site in _DIVERGING_SITES for fault in plan.faults)
