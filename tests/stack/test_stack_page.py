"""docs/stack.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sdcwatch.stack.cli import up

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stack.md").read_text()
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
DEFAULTS = {parameter.opts[0]: parameter.default for parameter in up.params}


def test_every_option_of_the_command_is_on_the_page_and_the_reverse() -> None:
    table = PAGE.split("| option | for |")[1].split("\n\n")[0]
    told = set(re.findall(r"`(--[a-z-]+)", table.replace("`, `", "` `")))

    assert told == set(DEFAULTS) - {"--local"}


def test_the_ports_on_the_page_are_those_of_the_containers_and_of_the_command() -> None:
    table = PAGE.split("| what | where |")[1].split("\n\n")[0]
    told = set(re.findall(r"127\.0\.0\.1:(\d+)", table))
    published = {p.split(":")[1] for s in SERVICES.values() for p in s.get("ports", ())}

    assert told == published
    chosen = {str(value) for name, value in DEFAULTS.items() if name.endswith("-port")}
    assert chosen <= told


def test_the_page_names_every_container() -> None:
    assert [name for name in SERVICES if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:deploy|alerts|docker)/[\w./-]+\w", PAGE)))
)
def test_every_path_on_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_make_targets_on_the_page_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert set(re.findall(r"make ([a-z-]+)", PAGE)) <= set(targets)
