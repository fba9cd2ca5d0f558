"""Write the generated files, or say which of them differ from what would be written."""

from __future__ import annotations

from pathlib import Path

from sdcwatch.monitor.boards.board import to_json
from sdcwatch.monitor.boards.fleet import fleet_board
from sdcwatch.monitor.boards.run import run_board
from sdcwatch.monitor.boards.suspect import suspect_board
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import rule_files


def generated_files(config: MonitorConfig) -> dict[str, str]:
    """Every generated file: path below the output directory, and text.

    Raises:
        ConfigurationError: grafana-foundation-sdk is missing, or is not of the 0.0 line.
    """
    # Rule files alone must not need the SDK, which wants Python 3.11.
    from sdcwatch.monitor.build import dashboard_files

    return {**dashboard_files(config), **rule_files(config)}


def write(files: dict[str, str], out: Path) -> tuple[Path, ...]:
    """Write files below `out`; the paths whose content changed."""
    changed = []
    for name, text in files.items():
        path = out / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        changed.append(path)
    return tuple(changed)


def differences(files: dict[str, str], out: Path) -> tuple[str, ...]:
    """One sentence for each file that is missing, differs, or is no longer generated."""
    found = []
    for name, text in files.items():
        path = out / name
        if not path.exists():
            found.append(f"{name} is missing")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{name} differs")
    kept = {out / name for name in files}
    for pattern in ("dashboards/*.json", "alerts/*.y*ml", "alerts/grafana/*.y*ml"):
        found += [
            f"{path.relative_to(out)} is not generated any more"
            for path in sorted(out.glob(pattern))
            if path not in kept
        ]
    return tuple(found)


def dashboard_files(config: MonitorConfig) -> dict[str, str]:
    """Every dashboard: path below the output directory, and JSON."""
    boards = (fleet_board(config), run_board(config), suspect_board(config))
    return {f"dashboards/{config.uid_prefix}-{b.slug}.json": to_json(b, config) for b in boards}
