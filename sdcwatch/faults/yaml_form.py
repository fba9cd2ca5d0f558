"""Fault plans as YAML files. The form is documented in docs/faults.md."""

from __future__ import annotations

from pathlib import Path

from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.plan import FaultPlan

try:
    import yaml
except ImportError as error:  # pragma: no cover - exercised in a process without PyYAML
    msg = "Expected PyYAML for fault plans, but it is missing. Do: pip install 'sdcwatch[monitor]'"
    raise ImportError(msg) from error


def load_plan(path: Path | str) -> FaultPlan:
    """Read a fault plan.

    Args:
        path: A YAML file in the form of docs/faults.md.

    Raises:
        ConfigurationError: The file is missing, is no YAML, or holds a plan that cannot work; the
            message names the file and the fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        msg = f"Expected a fault plan at {path}, but got: {error.strerror}. Check the path."
        raise ConfigurationError(msg) from error
    try:
        return parse_plan(text)
    except ConfigurationError as error:
        msg = f"{path}: {error}"
        raise ConfigurationError(msg) from error


def parse_plan(text: str) -> FaultPlan:
    """A fault plan from YAML text.

    Raises:
        ConfigurationError: The text is no YAML or holds a plan that cannot work.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        msg = f"Expected YAML, but got: {error}. Correct the syntax there."
        raise ConfigurationError(msg) from error
    return FaultPlan.from_dict({} if data is None else data)


def dump_plan(plan: FaultPlan) -> str:
    """A fault plan as YAML text; `parse_plan` is the inverse."""
    # non-ASCII text is escaped: PyYAML folds some of it, U+0085 for one, if it may write it plainly
    text: str = yaml.safe_dump(plan.to_dict(), sort_keys=False)
    return text
