"""The generated dashboards: path and JSON of each."""

from __future__ import annotations

from sdcwatch.monitor.boards.board import to_json
from sdcwatch.monitor.boards.fleet import fleet_board
from sdcwatch.monitor.boards.run import run_board
from sdcwatch.monitor.boards.suspect import suspect_board
from sdcwatch.monitor.config import MonitorConfig


def dashboard_files(config: MonitorConfig) -> dict[str, str]:
    """Every dashboard: path below the output directory, and JSON."""
    boards = (fleet_board(config), run_board(config), suspect_board(config))
    return {f"dashboards/{config.uid_prefix}-{b.slug}.json": to_json(b, config) for b in boards}
