"""What a finished run has to say: a page for people, and a grade against a plan of faults."""

from importlib.util import find_spec


def can_write_pages() -> bool:
    """Whether the packages behind ``sdcwatch[report]`` are installed."""
    return all(find_spec(name) is not None for name in ("plotly", "jinja2"))
