"""The W&B run that the script has made, found without importing wandb."""

from __future__ import annotations

import sys
from typing import Any


def active_run() -> Any | None:
    """The run of ``wandb.init`` in this process, or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


def active_run_id() -> str | None:
    """Its id, or None: a name for the guarded run where neither config nor launcher has one."""
    run_id = getattr(active_run(), "id", None)
    return run_id if isinstance(run_id, str) and run_id else None
