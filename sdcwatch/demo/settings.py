"""What a demo run is told: one frozen value that travels from the command line to every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sdcwatch.errors import ConfigurationError

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
