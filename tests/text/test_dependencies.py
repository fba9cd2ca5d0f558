"""What is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
USERS = ("wandb", "monitor", "report", "demo", "all")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    """Distributions that requirements name."""
    return {normal(match[0]) for line in requirements if (match := re.match(r"[\w.-]+", line))}


def imported(folder: str) -> set[str]:
    """Top-level packages that the files of a folder import, ours and the standard library aside."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"sdcwatch"}


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, except what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from runtime_nodes(child)


def test_every_package_that_sdcwatch_imports_is_declared() -> None:
    declared = names([*PROJECT["dependencies"], *(r for group in EXTRAS.values() for r in group)])
    providers = packages_distributions()
    undeclared = {
        package
        for package in imported("sdcwatch")
        if not {normal(name) for name in providers.get(package, [])} & declared
    }

    assert undeclared == set()


def test_every_requirement_of_the_product_is_imported() -> None:
    product = [*PROJECT["dependencies"], *(r for name in USERS for r in EXTRAS[name])]
    packages = {package for folder in ("sdcwatch", "docker") for package in imported(folder)}
    used = {normal(d) for package in packages for d in packages_distributions().get(package, [])}

    assert names(product) - used == {"sdcwatch"}
