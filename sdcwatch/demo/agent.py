"""Runs the ranks of a demo through torch's elastic launcher, one segment after another.

A process of its own, so that the one in front of the user starts at once and can end this one and
all its children, whatever they are doing: ``python -m sdcwatch.demo.agent SETTINGS``. Its standard
input is a lifeline: when that closes, everything here ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from sdcwatch.core.records import Verdict
from sdcwatch.core.summary import fold
from sdcwatch.demo.settings import DemoSettings
from sdcwatch.errors import EXIT_CORRUPTION
from sdcwatch.sinks.jsonl import read_records

if TYPE_CHECKING:
    from sdcwatch.demo.train import Segment

_PRELOAD = ["torch", "torch._dynamo", "sdcwatch.demo.train"]
"""Imported once and shared by all ranks: six imports of torch on two cores take half a minute."""
_MOST_SEGMENTS = 5


def main(settings_path: Path) -> int:
    """Run every segment; returns 0, or the exit code of the segment that could not be followed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A shell that starts us in the background has SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()  # it imports torch while this process does the same
    from sdcwatch.demo.train import Segment

    settings = DemoSettings.load(settings_path)
    start_step, failed_step = 0, 0
    for number in range(1, _MOST_SEGMENTS + 1):
        segment = Segment(number=number, start_step=start_step, failed_step=failed_step)
        code = _run(settings, segment)
        if code != EXIT_CORRUPTION:
            return code
        start_step, failed_step = _where_to_resume(settings)
    return EXIT_CORRUPTION


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _run(settings: DemoSettings, segment: Segment) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from sdcwatch.demo.train import train

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.world_size,
        run_id=f"{settings.run}-{segment.number}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="forkserver",
        shutdown_timeout=3,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(settings.run_dir / "logs"), redirects=Std.ALL, tee=Std.NONE
        ),
    )
    try:
        codes: dict[int, int] = elastic_launch(config, train)(settings, segment)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return max(codes.values())


def _where_to_resume(settings: DemoSettings) -> tuple[int, int]:
    """The last good checkpoint, 0 for the beginning, and the step at which corruption was found."""
    records = read_records(settings.run_dir)
    failed = [r.step for r in records if isinstance(r, Verdict) and r.failed]
    return fold(records).last_good_checkpoint_step or 0, max(failed, default=0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
