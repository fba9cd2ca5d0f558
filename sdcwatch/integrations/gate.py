"""Puts the guard's question in front of a framework's own method of saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ReplacedMethods:
    """Methods of single objects that stand for the class's own, until `restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Put ``make(own)`` in the place of the method `name` of `owner`.

        Args:
            owner: The object; its class is left alone.
            name: Name of the method.
            make: Gets the method that is there now.
        """
        before = vars(owner).get(name)
        self._replaced.append((owner, name, before))
        setattr(owner, name, make(getattr(owner, name)))

    def restore(self) -> None:
        """Put back what was there; may be called again."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
