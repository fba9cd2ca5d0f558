"""The runbook as a page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.alerts import DRILL, alerts
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.stack import runbook as module
from sdcwatch.stack.cli import stack
from sdcwatch.stack.runbook import anchor, find_runbook, render, write_runbook


class _Ids(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]


def ids(page: str) -> list[str]:
    parser = _Ids()
    parser.feed(page)
    return parser.ids


def test_every_heading_has_its_anchor_and_tables_are_tables() -> None:
    page = render("# The `run` book\n\n## SdcwatchSuspectRank\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")

    assert ids(page) == ["the-run-book", "sdcwatchsuspectrank"]
    assert "<title>The run book</title>" in page
    assert "<td>1</td>" in page


@pytest.mark.parametrize(
    ("heading", "expected"),
    [("SdcwatchDrill", "sdcwatchdrill"), ("Replace when?", "replace-when"), ("A – b", "a--b")],
)
def test_an_anchor_is_what_code_hosts_make_of_the_heading(heading: str, expected: str) -> None:
    assert anchor(heading) == expected


def test_markup_in_the_source_stays_text() -> None:
    assert "<script>" not in render("<script>alert(1)</script>")


def test_every_alert_leads_to_an_anchor_of_the_page() -> None:
    source = find_runbook()
    assert source is not None
    found = ids(render(source.read_text(encoding="utf-8")))

    names = [alert.anchor for alert in alerts(MonitorConfig())]
    assert [name for name in (*names, DRILL.lower()) if name not in found] == []


def test_the_command_writes_the_page_that_the_default_link_names(tmp_path: Path) -> None:
    source = tmp_path / "r.md"
    source.write_text("# Runbook\n")
    out = tmp_path / "user"
    result = CliRunner().invoke(stack, ["runbook", "--source", str(source), "--out", str(out)])

    assert result.exit_code == 0, result.output
    name = MonitorConfig().runbook_url.rpartition("/user/")[2]
    assert ids((out / name).read_text()) == ["runbook"]


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected a runbook .*gone\.md"):
        write_runbook(tmp_path / "gone.md", tmp_path)


def test_a_wheel_carries_the_runbook_where_the_command_looks_for_it() -> None:
    root = Path(module.__file__).parents[2]
    wanted = f'"{module.CHECKOUT.relative_to(root)}" = "{module.SHIPPED.relative_to(root)}"'

    section = (root / "pyproject.toml").read_text().partition("wheel.force-include]\n")[2]
    assert section.startswith(wanted)
